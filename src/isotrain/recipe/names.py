"""The known key that an unknown one was probably meant to be."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import lru_cache

from isotrain.language import tr
from isotrain.recipe.fields import SectionType, leaves, section_paths

# What scripts of verl, OpenRLHF and TRL call our fields, where the spelling alone does not lead there. Looked
# up by the full dotted name first, then without its first parts, so that `optim.lr_scheduler_type` and a bare
# `--lr_scheduler_type` find the same field.
_OTHERS = {
    "name": "experiment_name run_name",
    "output": "ckpt_path default_local_dir save_path",
    "device.type": "trainer.device",
    "device.ranks": "n_gpus_per_node nnodes",
    "model.path": "model_name_or_path partial_pretrain pretrain",
    "model.dtype": "bf16 torch_dtype",
    "model.attention": "attn_implementation",
    "model.lora.rank": "lora_r lora_rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": "lora_target_modules target_modules",
    "model.lora.dropout": "lora_dropout",
    "data.train": "dataset dataset_name prompt_data train_dataset train_files",
    "data.validation": "eval_dataset val_files",
    "data.prompt_key": "input_key",
    "data.completion_key": "output_key response_key",
    "data.max_length": "max_prompt_length prompt_length prompt_max_len",
    "data.too_long": "filter_overlong_prompts truncation",
    "data.batch_size": "generation_batch_size rollout_batch_size train_batch_size",
    "data.tokens_per_micro_batch": (
        "max_token_len_per_gpu micro_batch_size micro_batch_size_per_gpu micro_train_batch_size "
        "micro_rollout_batch_size per_device_train_batch_size ppo_max_token_len_per_gpu"
    ),
    "algorithm.name": "adv_estimator advantage_estimator",
    "algorithm.ppo_epochs": "num_iterations",
    "algorithm.loss.name": "importance_sampling_level loss_mode",
    "algorithm.loss.clip_ratio_low": "clip_ratio eps_clip_low_high epsilon",
    "algorithm.loss.clip_ratio_high": "epsilon_high",
    "algorithm.loss.dual_clip": "clip_ratio_c delta",
    "algorithm.loss.aggregation": "loss_agg_mode loss_type",
    "algorithm.loss.entropy": "entropy_coef entropy_coeff entropy_loss_coef",
    "algorithm.kl.place": "use_kl_in_reward use_kl_loss",
    "algorithm.kl.coefficient": "beta init_kl_coef kl_coef kl_loss_coef",
    "algorithm.kl.estimator": "kl_loss_type kl_penalty",
    "algorithm.rollout_correction.level": (
        "enable_vllm_is_correction rollout_is vllm_importance_sampling_correction"
    ),
    "algorithm.rollout_correction.mode": "vllm_importance_sampling_mode",
    "algorithm.rollout_correction.upper": (
        "rollout_is_threshold vllm_importance_sampling_cap vllm_is_truncated_threshold"
    ),
    "algorithm.rollout_correction.reject": "rollout_rs rollout_rs_threshold",
    "algorithm.dynamic_sampling.max_attempts": "dynamic_filtering filter_groups.enable max_num_gen_batches",
    "algorithm.overlong.buffer": "overlong_buffer.len",
    "algorithm.overlong.factor": "penalty_factor",
    "algorithm.scale_by_std": "norm_adv_by_std_in_grpo scale_rewards",
    "algorithm.critic.path": "critic.model.path",
    "algorithm.critic.lr": "critic.optim.lr critic_learning_rate",
    "algorithm.critic.warmup_steps": "critic_warmup",
    "rollout.engine": "rollout.name use_vllm",
    "rollout.n": "n_samples_per_prompt num_generations",
    "rollout.max_tokens": "generate_max_len max_completion_length max_response_length loss_scale_factor",
    "rollout.environment.path": "environment_factory agent_func_path",
    "rollout.environment.max_turns": "max_tool_calling_iterations max_assistant_turns",
    "rollout.environment.tool_parser": "multi_turn.format",
    "rollout.agent.concurrency": "max_concurrent_rollouts",
    "rollout.staleness": "async_train staleness_threshold",
    "rollout.in_flight": "partial_rollout",
    "rollout.engines": "vllm_num_engines",
    "rollout.tensor_parallel": "tensor_model_parallel_size",
    "rollout.eager": "enforce_eager",
    "rollout.record": "log_completions",
    "rollout.validation.temperature": "val_kwargs.temperature",
    "reward.function.path": "remote_rm_url reward_funcs",
    "reward.model.path": "reward_model.model.path reward_pretrain",
    "reward.answer_key": "label_key",
    "cluster.placement": "colocate_all_models vllm_mode",
    "cluster.offload": "vllm_enable_sleep",
    "model.offload.weights": "param_offload cpu_offload",
    "model.offload.optimizer": "optimizer_offload adam_offload",
    "model.offload.activations": "enable_activation_offload activation_offload",
    "model.compile": "use_torch_compile torch_compile",
    "optimizer.lr": "optim.lr actor_learning_rate learning_rate",
    "optimizer.betas": "optimizer.beta",
    "optimizer.eps": "optimizer.epsilon",
    "optimizer.max_grad_norm": "clip_grad grad_clip",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.warmup_ratio": "lr_warmup_steps_ratio",
    "optimizer.warmup_steps": "lr_warmup_steps",
    "trainer.epochs": "num_episodes num_train_epochs total_epochs",
    "trainer.steps": "max_steps total_training_steps",
    "trainer.validate_every": "eval_steps test_freq",
    "trainer.validate_first": "eval_on_start val_before_train",
    "trainer.save_every": "save_freq save_steps",
    "trainer.keep_checkpoints": "max_ckpt_num save_total_limit",
    "trainer.resume": "resume_from_checkpoint resume_mode",
    "observe.loggers": "report_to",
    "observe.project": "project_name",
}
OTHER_NAMES = {name: field for field, names in _OTHERS.items() for name in names.split()}

# Notes for names that do not map to one field with the same meaning. Looked up likewise.
NOTES = {
    "beta": tr("Also set 'algorithm.kl.place: loss'."),
    "clip_ratio": tr("Above, it is 'algorithm.loss.clip_ratio_high'."),
    "colocate_all_models": tr("Write 'placement: colocated'."),
    "eps_clip_low_high": tr("Above, it is 'algorithm.loss.clip_ratio_high'."),
    "epsilon": tr("Above, it is 'algorithm.loss.clip_ratio_high'."),
    "generation_batch_size": tr("It counts prompts, not responses."),
    "importance_sampling_level": tr("For sequences, write 'name: gspo'."),
    "kl_loss_type": tr("low_var_kl is 'k3', kl is 'k1', mse is 'k2'."),
    "kl_penalty": tr("low_var_kl is 'k3', kl is 'k1', mse is 'k2'."),
    "loss_scale_factor": tr("'aggregation: seq-mean-token-sum-norm' divides by it."),
    "loss_type": tr("docs/algorithms.md lists TRL's names."),
    "micro_batch_size": tr("It counts tokens, not samples."),
    "micro_batch_size_per_gpu": tr("It counts tokens, not samples."),
    "micro_rollout_batch_size": tr("It counts tokens, not samples."),
    "micro_train_batch_size": tr("It counts tokens, not samples."),
    "partial_rollout": tr("Also set 'rollout.staleness' to 1 or more."),
    "per_device_train_batch_size": tr("It counts tokens, not samples."),
    "n_gpus_per_node": tr("For online algorithms it counts the devices of all machines."),
    "nnodes": tr("It counts devices: for online algorithms write those of all machines together."),
    "scale_rewards": tr("It takes true or false."),
    "use_kl_in_reward": tr("Write 'place: reward'."),
    "use_kl_loss": tr("Write 'place: loss'."),
    "use_vllm": tr("Write 'engine: vllm'."),
}

# Their names of the values of our fields.
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


def nearest(written: str, model: SectionType, usable: Sequence[str] | None = None) -> str | None:
    """The full dotted name of the field or section that `written` was probably meant to be, if any is near.

    `usable` are the names that the chosen variants have; the others count where none of these is near.
    """
    if len(written) > _LONGEST:
        return None
    known = all_names(model)
    if written in known:
        return written
    for tail in _tails(written):
        if OTHER_NAMES.get(tail) in known:
            return OTHER_NAMES[tail]
        if "." in tail and tail in known:
            return tail
    usable = usable or known
    return _related(written, usable) or _related(written, known) or _alike(written, usable)


def note(written: str) -> str:
    """A note for another trainer's key that does not map to one field with the same meaning."""
    return next((NOTES[tail] for tail in _tails(written) if tail in NOTES), "")


@lru_cache(maxsize=8)
def all_names(model: SectionType) -> tuple[str, ...]:
    """The dotted name of every field and section, of all variants."""
    return tuple(dict.fromkeys([*(leaf.path for leaf in leaves(model)), *section_paths(model)]))


def _tails(name: str) -> list[str]:
    """`a.b.c`, `b.c`, `c`: other trainers nest our names more deeply, or not at all."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _related(written: str, known: Sequence[str]) -> str | None:
    """The name that ends alike, or one of the same section that is spelled alike."""
    inside, _, last = written.rpartition(".")
    same_name = [name for name in known if name.rsplit(".")[-1] == last]
    if same_name:
        return max(same_name, key=lambda name: _likeness(name, written))
    siblings = {name.rsplit(".")[-1]: name for name in known if name.rpartition(".")[0] == inside}
    near = get_close_matches(last, siblings, n=1, cutoff=_NEAR_SIBLING)
    return siblings[near[0]] if near else None


def _alike(written: str, known: Sequence[str]) -> str | None:
    """The field anywhere else that is spelled most alike."""
    inside, _, last = written.rpartition(".")
    sections = {name.rpartition(".")[0] for name in known}
    scores = {
        name: max(_likeness(name, written), _likeness(name.rsplit(".")[-1], last))
        for name in known
        if name not in sections and name.rpartition(".")[0] != inside
    }
    best = max(scores, key=lambda name: scores[name], default=None)
    return best if best is not None and scores[best] >= _NEAR_ANYWHERE else None


def near_section(written: str, model: SectionType) -> str | None:
    """The section that a misspelled section's name was meant to be; only siblings count."""
    if len(written) > _LONGEST:
        return None
    inside, _, last = written.rpartition(".")
    parted = [(name, *name.rpartition(".")) for name in section_paths(model)]
    siblings = {tail: name for name, above, _, tail in parted if above == inside}
    near = get_close_matches(last, siblings, n=1, cutoff=_NEAR_SECTION)
    return siblings[near[0]] if near else None


def _likeness(name: str, other: str) -> float:
    return SequenceMatcher(None, name, other).ratio()
