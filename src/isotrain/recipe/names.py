"""The known key that an unknown one was probably meant to be."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import lru_cache

from isotrain.recipe.fields import SectionType, leaves, section_paths

# What verl, OpenRLHF, TRL and others call our fields. Looked up by the full dotted name first, then without
# its first parts, so that `optim.lr_scheduler` and a bare `--lr_scheduler` find the same field.
OTHER_NAMES = {
    "trainer.logger": "observe.loggers",
    "trainer.device": "device.type",
    "model.target_modules": "model.lora.targets",
    "model.name": "model.path",
    "optimizer.beta": "optimizer.betas",
    "optimizer.epsilon": "optimizer.eps",
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
    "filter_overlong_prompts": "data.too_long",
    "generation_batch_size": "data.batch_size",
    "input_key": "data.prompt_key",
    "max_len": "data.max_length",
    "max_prompt_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
    "max_token_len_per_gpu": "data.tokens_per_micro_batch",
    "micro_batch_size": "data.tokens_per_micro_batch",
    "micro_batch_size_per_gpu": "data.tokens_per_micro_batch",
    "micro_train_batch_size": "data.tokens_per_micro_batch",
    "micro_rollout_batch_size": "data.tokens_per_micro_batch",
    "output_key": "data.completion_key",
    "per_device_train_batch_size": "data.tokens_per_micro_batch",
    "ppo_max_token_len_per_gpu": "data.tokens_per_micro_batch",
    "prompt_data": "data.train",
    "prompt_length": "data.max_length",
    "prompt_max_len": "data.max_length",
    "response_key": "data.completion_key",
    "rollout_batch_size": "data.batch_size",
    "train_batch_size": "data.batch_size",
    "train_dataset": "data.train",
    "train_files": "data.train",
    "truncation": "data.too_long",
    "val_files": "data.validation",
    # Online algorithms
    "adv_estimator": "algorithm.name",
    "advantage_estimator": "algorithm.name",
    "algorithm.kl_coef": "algorithm.kl.coefficient",
    "beta": "algorithm.kl.coefficient",
    "clip_ratio": "algorithm.loss.clip_ratio_low",
    "clip_ratio_c": "algorithm.loss.dual_clip",
    "clip_ratio_high": "algorithm.loss.clip_ratio_high",
    "clip_ratio_low": "algorithm.loss.clip_ratio_low",
    "delta": "algorithm.loss.dual_clip",
    "dynamic_filtering": "algorithm.dynamic_sampling.max_attempts",
    "enable_vllm_is_correction": "algorithm.rollout_correction.level",
    "entropy_coef": "algorithm.loss.entropy",
    "entropy_coeff": "algorithm.loss.entropy",
    "entropy_loss_coef": "algorithm.loss.entropy",
    "eps_clip": "algorithm.loss.clip_ratio_low",
    "eps_clip_low_high": "algorithm.loss.clip_ratio_low",
    "epsilon": "algorithm.loss.clip_ratio_low",
    "epsilon_high": "algorithm.loss.clip_ratio_high",
    "filter_groups.enable": "algorithm.dynamic_sampling.max_attempts",
    "importance_sampling_level": "algorithm.loss.name",
    "init_kl_coef": "algorithm.kl.coefficient",
    "kl_coef": "algorithm.kl.coefficient",
    "kl_ctrl.type": "algorithm.kl.controller",
    "kl_estimator": "algorithm.kl.estimator",
    "kl_horizon": "algorithm.kl.horizon",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "kl_loss_type": "algorithm.kl.estimator",
    "kl_penalty": "algorithm.kl.estimator",
    "kl_target": "algorithm.kl.target",
    "lambd": "algorithm.lam",
    "loss_agg_mode": "algorithm.loss.aggregation",
    "loss.horizon": "rollout.max_tokens",
    "loss_mode": "algorithm.loss.name",
    "loss_scale_factor": "rollout.max_tokens",
    "loss_type": "algorithm.loss.aggregation",
    "max_num_gen_batches": "algorithm.dynamic_sampling.max_attempts",
    "norm_adv_by_std_in_grpo": "algorithm.scale_by_std",
    "num_iterations": "algorithm.ppo_epochs",
    "overlong_buffer.len": "algorithm.overlong.buffer",
    "overlong_buffer_len": "algorithm.overlong.buffer",
    "overlong_penalty_factor": "algorithm.overlong.factor",
    "penalty_factor": "algorithm.overlong.factor",
    "policy_loss_type": "algorithm.loss.name",
    "ppo_epochs": "algorithm.ppo_epochs",
    "ppo_mini_batch_size": "algorithm.mini_batch_size",
    "rollout_is": "algorithm.rollout_correction.level",
    "rollout_is_level": "algorithm.rollout_correction.level",
    "rollout_is_mode": "algorithm.rollout_correction.mode",
    "rollout_is_threshold": "algorithm.rollout_correction.upper",
    "rollout_is_threshold_lower": "algorithm.rollout_correction.lower",
    "rollout_rs": "algorithm.rollout_correction.mode",
    "scale_rewards": "algorithm.scale_by_std",
    "target_kl": "algorithm.kl.target",
    "use_kl_in_reward": "algorithm.kl.place",
    "use_kl_loss": "algorithm.kl.place",
    "vllm_importance_sampling_cap": "algorithm.rollout_correction.upper",
    "vllm_importance_sampling_correction": "algorithm.rollout_correction.level",
    "vllm_importance_sampling_mode": "algorithm.rollout_correction.mode",
    "vllm_is_truncated_threshold": "algorithm.rollout_correction.upper",
    # Critic
    "cliprange_value": "algorithm.critic.clip",
    "critic.model.path": "algorithm.critic.path",
    "critic.optim.lr": "algorithm.critic.lr",
    "critic_learning_rate": "algorithm.critic.lr",
    "critic_pretrain": "algorithm.critic.path",
    "critic_warmup": "algorithm.critic.warmup_steps",
    "freezing_actor_steps": "algorithm.critic.warmup_steps",
    "value_clip": "algorithm.critic.clip",
    # Rollout and cluster
    "async_train": "rollout.staleness",
    "colocate_all_models": "cluster.placement",
    "enforce_eager": "rollout.eager",
    "generate_max_len": "rollout.max_tokens",
    "gpu_memory_utilization": "rollout.memory_utilization",
    "log_completions": "rollout.record",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "n_samples_per_prompt": "rollout.n",
    "num_generations": "rollout.n",
    "optimizer_offload": "cluster.offload",
    "param_offload": "cluster.offload",
    "response_length": "rollout.max_tokens",
    "rollout.name": "rollout.engine",
    "rollout_data_dir": "rollout.record",
    "staleness_threshold": "rollout.staleness",
    "tensor_model_parallel_size": "rollout.tensor_parallel",
    "use_vllm": "rollout.engine",
    "val_kwargs.n": "rollout.validation.n",
    "val_kwargs.temperature": "rollout.validation.temperature",
    "vllm_enable_sleep": "cluster.offload",
    "vllm_gpu_memory_utilization": "rollout.memory_utilization",
    "vllm_mode": "cluster.placement",
    "vllm_num_engines": "rollout.engines",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel",
    # Reward
    "custom_reward_function.path": "reward.function.path",
    "label_key": "reward.answer_key",
    "remote_rm_url": "reward.function.path",
    "reward_funcs": "reward.function.path",
    "reward_function": "reward.function.path",
    "reward_model.model.path": "reward.model.path",
    "reward_model_path": "reward.model.path",
    "reward_pretrain": "reward.model.path",
    # Optimizer
    "actor_learning_rate": "optimizer.lr",
    "adam_betas": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "clip_grad": "optimizer.max_grad_norm",
    "grad_clip": "optimizer.max_grad_norm",
    "learning_rate": "optimizer.lr",
    "lr_scheduler": "optimizer.schedule",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_warmup_ratio": "optimizer.warmup_ratio",
    "lr_warmup_steps_ratio": "optimizer.warmup_ratio",
    "max_grad_norm": "optimizer.max_grad_norm",
    "max_norm": "optimizer.max_grad_norm",
    "warmup_steps_ratio": "optimizer.warmup_ratio",
    # Run
    "ckpt_path": "output",
    "default_local_dir": "output",
    "eval_on_start": "trainer.validate_first",
    "eval_steps": "trainer.validate_every",
    "experiment_name": "name",
    "deterministic": "device.determinism",
    "full_determinism": "device.determinism",
    "logging_dir": "output",
    "max_ckpt_num": "trainer.keep_checkpoints",
    "max_ckpt_to_keep": "trainer.keep_checkpoints",
    "max_epochs": "trainer.epochs",
    "max_steps": "trainer.steps",
    "n_gpus_per_node": "device.ranks",
    "nnodes": "device.ranks",
    "nproc_per_node": "device.ranks",
    "num_episodes": "trainer.epochs",
    "num_train_epochs": "trainer.epochs",
    "output_dir": "output",
    "project_name": "observe.project",
    "report_to": "observe.loggers",
    "resume_from_checkpoint": "trainer.resume",
    "resume_mode": "trainer.resume",
    "run_name": "name",
    "save_freq": "trainer.save_every",
    "save_path": "output",
    "save_steps": "trainer.save_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "test_freq": "trainer.validate_every",
    "val_before_train": "trainer.validate_first",
    "total_epochs": "trainer.epochs",
    "total_training_steps": "trainer.steps",
}

# What else to say of such a name where it is not one field with the same meaning. Looked up likewise.
NOTES = {
    "beta": "It also wants 'algorithm.kl.place: loss'.",
    "clip_ratio": "Above, it is 'algorithm.loss.clip_ratio_high'.",
    "colocate_all_models": "Write 'placement: colocated'.",
    "eps_clip": "Above, it is 'algorithm.loss.clip_ratio_high'.",
    "eps_clip_low_high": "Above, it is 'algorithm.loss.clip_ratio_high'.",
    "epsilon": "Above, it is 'algorithm.loss.clip_ratio_high'.",
    "generation_batch_size": "It counts prompts, not answers.",
    "importance_sampling_level": "For sequences, write 'name: gspo'.",
    "kl_loss_type": "low_var_kl is 'k3', kl is 'k1', mse is 'k2'.",
    "kl_penalty": "low_var_kl is 'k3', kl is 'k1', mse is 'k2'.",
    "loss.horizon": "'aggregation: seq-mean-token-sum-norm' divides by it.",
    "loss_scale_factor": "'aggregation: seq-mean-token-sum-norm' divides by it.",
    "loss_type": "docs/algorithms.md has what TRL's names are here.",
    "micro_batch_size": "It counts tokens, not samples.",
    "micro_batch_size_per_gpu": "It counts tokens, not samples.",
    "micro_rollout_batch_size": "It counts tokens, not samples.",
    "micro_train_batch_size": "It counts tokens, not samples.",
    "per_device_train_batch_size": "It counts tokens, not samples.",
    "n_gpus_per_node": "For online algorithms it counts the devices of all machines.",
    "nnodes": "It counts devices: for online algorithms write those of all machines together.",
    "scale_rewards": "It takes true or false.",
    "use_kl_in_reward": "Write 'place: reward'.",
    "use_kl_loss": "Write 'place: loss'.",
    "use_vllm": "Write 'engine: vllm'.",
}

# What they call the values of our fields.
OTHER_VALUES = {
    "colocate": "colocated",
    "dapo": "grpo",
    "dr_grpo": "grpo",
    "gae": "ppo",
    "group_norm": "grpo",
    "kl": "k1",
    "low_var_kl": "k3",
    "mse": "k2",
    "reinforce_baseline": "reinforce++-baseline",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++-baseline",
    "vanilla": "clip",
}

_LONGEST = 200
_NEAR_SIBLING = 0.6
_NEAR_ANYWHERE = 0.75
_NEAR_SECTION = 0.8


def nearest(wanted: str, model: SectionType, usable: Sequence[str] | None = None) -> str | None:
    """The full dotted name of the field or section that `wanted` was probably meant to be, if any is near.

    `usable` are the names that the chosen variants have; the others count where none of these is near.
    """
    if len(wanted) > _LONGEST:
        return None
    known = all_names(model)
    if wanted in known:
        return wanted
    for tail in _tails(wanted):
        if OTHER_NAMES.get(tail) in known:
            return OTHER_NAMES[tail]
        if "." in tail and tail in known:
            return tail
    usable = usable or known
    return _related(wanted, usable) or _related(wanted, known) or _alike(wanted, usable)


def note(wanted: str) -> str:
    """What else to know where another trainer's key is not one field with the same meaning."""
    return next((NOTES[tail] for tail in _tails(wanted) if tail in NOTES), "")


@lru_cache(maxsize=8)
def all_names(model: SectionType) -> tuple[str, ...]:
    """The dotted name of every field and section, of all variants."""
    return tuple(dict.fromkeys([*(leaf.path for leaf in leaves(model)), *section_paths(model)]))


def _tails(name: str) -> list[str]:
    """`a.b.c`, `b.c`, `c`: other trainers nest our names more deeply, or not at all."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _related(wanted: str, known: Sequence[str]) -> str | None:
    """The name that ends alike, or one of the same section that is spelled alike."""
    inside, _, last = wanted.rpartition(".")
    same_name = [name for name in known if name.rsplit(".")[-1] == last]
    if same_name:
        return max(same_name, key=lambda name: _likeness(name, wanted))
    siblings = {name.rsplit(".")[-1]: name for name in known if name.rpartition(".")[0] == inside}
    near = get_close_matches(last, siblings, n=1, cutoff=_NEAR_SIBLING)
    return siblings[near[0]] if near else None


def _alike(wanted: str, known: Sequence[str]) -> str | None:
    """The field anywhere else that is spelled most alike."""
    inside, _, last = wanted.rpartition(".")
    sections = {name.rpartition(".")[0] for name in known}
    scores = {
        name: max(_likeness(name, wanted), _likeness(name.rsplit(".")[-1], last))
        for name in known
        if name not in sections and name.rpartition(".")[0] != inside
    }
    best = max(scores, key=lambda name: scores[name], default=None)
    return best if best is not None and scores[best] >= _NEAR_ANYWHERE else None


def near_section(wanted: str, model: SectionType) -> str | None:
    """The section that a misspelled section's name was meant to be; only siblings count."""
    if len(wanted) > _LONGEST:
        return None
    inside, _, last = wanted.rpartition(".")
    siblings = {
        name.rpartition(".")[2]: name for name in section_paths(model) if name.rpartition(".")[0] == inside
    }
    near = get_close_matches(last, siblings, n=1, cutoff=_NEAR_SECTION)
    return siblings[near[0]] if near else None


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
