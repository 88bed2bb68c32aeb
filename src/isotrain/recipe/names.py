"""The known key that an unknown one was probably meant to be."""

from __future__ import annotations

from difflib import SequenceMatcher, get_close_matches

from isotrain.recipe.fields import SectionType, leaves, section_paths

# What other trainers call our fields. Looked up by the full dotted name first, then by its last part, so that
# `optim.lr_scheduler` and a bare `--lr_scheduler` find the same field.
OTHER_NAMES = {
    "trainer.logger": "observe.sinks",
    "trainer.device": "device.type",
    "model.target_modules": "model.lora.targets",
    "optim.betas": "optimizer.betas",
    "optim.lr": "optimizer.lr",
    "optim.weight_decay": "optimizer.weight_decay",
    # Model and adapters
    "attn_implementation": "model.attention",
    "bf16": "model.dtype",
    "enable_gradient_checkpointing": "model.gradient_checkpointing",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_target_modules": "model.lora.targets",
    "model_name_or_path": "model.path",
    "partial_pretrain": "model.path",
    "pretrain": "model.path",
    "target_modules": "model.lora.targets",
    "torch_dtype": "model.dtype",
    # Data
    "dataset": "data.train",
    "dataset_name": "data.train",
    "eval_dataset": "data.validation",
    "input_key": "data.prompt_key",
    "max_len": "data.max_length",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "max_token_len_per_gpu": "data.tokens_per_micro_batch",
    "micro_batch_size": "data.tokens_per_micro_batch",
    "micro_batch_size_per_gpu": "data.tokens_per_micro_batch",
    "micro_train_batch_size": "data.tokens_per_micro_batch",
    "output_key": "data.completion_key",
    "per_device_train_batch_size": "data.tokens_per_micro_batch",
    "ppo_max_token_len_per_gpu": "data.tokens_per_micro_batch",
    "response_key": "data.completion_key",
    "train_batch_size": "data.batch_size",
    "train_dataset": "data.train",
    "train_files": "data.train",
    "truncation": "data.too_long",
    "val_files": "data.validation",
    # Optimizer
    "adam_betas": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "clip_grad": "optimizer.clip_norm",
    "grad_clip": "optimizer.clip_norm",
    "learning_rate": "optimizer.lr",
    "lr_scheduler": "optimizer.schedule",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_warmup_ratio": "optimizer.warmup_ratio",
    "lr_warmup_steps_ratio": "optimizer.warmup_ratio",
    "max_grad_norm": "optimizer.clip_norm",
    "max_norm": "optimizer.clip_norm",
    "warmup_steps_ratio": "optimizer.warmup_ratio",
    # Run
    "ckpt_path": "output",
    "default_local_dir": "output",
    "eval_steps": "trainer.validate_every",
    "experiment_name": "name",
    "full_determinism": "device.deterministic",
    "logging_dir": "output",
    "max_ckpt_num": "trainer.keep_checkpoints",
    "max_ckpt_to_keep": "trainer.keep_checkpoints",
    "max_epochs": "trainer.epochs",
    "max_steps": "trainer.steps",
    "n_gpus_per_node": "device.ranks",
    "nproc_per_node": "device.ranks",
    "num_train_epochs": "trainer.epochs",
    "output_dir": "output",
    "project_name": "observe.project",
    "report_to": "observe.sinks",
    "resume_from_checkpoint": "trainer.resume",
    "resume_mode": "trainer.resume",
    "run_name": "name",
    "save_freq": "trainer.save_every",
    "save_path": "output",
    "save_steps": "trainer.save_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "test_freq": "trainer.validate_every",
    "total_epochs": "trainer.epochs",
    "total_training_steps": "trainer.steps",
}

_LONGEST = 200
_NEAR_SIBLING = 0.6
_NEAR_ANYWHERE = 0.75
_NEAR_SECTION = 0.8


def nearest(wanted: str, model: SectionType) -> str | None:
    """The full dotted name of the field or section that `wanted` was probably meant to be, if any is near."""
    if len(wanted) > _LONGEST:
        return None
    inside, _, last = wanted.rpartition(".")
    known = list(dict.fromkeys([leaf.path for leaf in leaves(model)] + list(section_paths(model))))
    if wanted in known:
        return wanted
    for name in (wanted, last):
        if OTHER_NAMES.get(name) in known:
            return OTHER_NAMES[name]

    same_name = [name for name in known if name.rsplit(".")[-1] == last]
    if same_name:
        return max(same_name, key=lambda name: _likeness(name, wanted))

    siblings = {name.rsplit(".")[-1]: name for name in known if name.rpartition(".")[0] == inside}
    near = get_close_matches(last, siblings, n=1, cutoff=_NEAR_SIBLING)
    if near:
        return siblings[near[0]]

    scores = {
        leaf.path: max(_likeness(leaf.path, wanted), _likeness(leaf.path.rsplit(".")[-1], last))
        for leaf in leaves(model)
    }
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] >= _NEAR_ANYWHERE else None


def near_section(wanted: str, model: SectionType) -> str | None:
    """The section that a misspelled section's name was meant to be; only siblings count."""
    if len(wanted) > _LONGEST:
        return None
    inside = wanted.rpartition(".")[0]
    siblings = [name for name in section_paths(model) if name.rpartition(".")[0] == inside]
    near = get_close_matches(wanted, siblings, n=1, cutoff=_NEAR_SECTION)
    return near[0] if near else None


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
