"""A recipe as a command of verl, and what of it that command does not say."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import Any

from isotrain.recipe.load import parse_recipe, resolved
from isotrain.recipe.online import ClusterSection, Online, OnlineSection, PpoSection
from isotrain.recipe.policy_loss import DistillationSection
from isotrain.recipe.schema import Recipe, SftSection
from isotrain.tools.imports.convert import from_source
from isotrain.tools.imports.draft import changes
from isotrain.tools.imports.keys import verl_ppo
from isotrain.tools.imports.source import ImportSource, ImportSourceError, flatten
from isotrain.tools.imports.verl import CUTS
from isotrain.tools.imports.verl_algorithm import ESTIMATORS, LOSSES, OPTIM, A, M, R

PER_MACHINE = 8

LOSS_OPTIONS = ("clip_ratio_low", "clip_ratio_high", "dual_clip", "tau_pos", "tau_neg", "max_ratio")

NO_LONG_PROMPTS = ("data.too_long", "error")


@dataclass(frozen=True)
class FieldDifference:
    """A field that the command does not carry: its value here, and the one that it would come back with."""

    field: str
    here: Any
    there: Any
    changes: bool


@dataclass(frozen=True)
class Exported:
    program: str
    overrides: dict[str, Any]
    differences: list[FieldDifference]

    @property
    def script(self) -> str:
        """A shell script with one override per line."""
        head = ["#!/usr/bin/env bash", "# Written by isotrain export-config."]
        for item in self.differences:
            head.append(f"# NOT CARRIED OVER {item.field}: {json.dumps(item.here)}"[:200])
        words = [f"python3 -m {self.program}"]
        words += [f"    {shlex.quote(f'{key}={_hydra(value)}')}" for key, value in self.overrides.items()]
        return "\n".join(head) + "\n" + " \\\n".join(words) + "\n"


def to_verl(recipe: Recipe) -> Exported:
    """verl's command for a recipe. It is read back, and every field that differs then is told."""
    if isinstance(recipe.algorithm, OnlineSection):
        program, overrides = "verl.trainer.main_ppo", _online(recipe)
    elif isinstance(recipe.algorithm, SftSection):
        program, overrides = _sft(recipe)
    else:
        raise ImportSourceError(
            f"verl has no trainer for {recipe.algorithm.name}; it has PPO's relatives and SFT"
        )
    source = ImportSource("overrides", program=program)
    for key, value in overrides.items():
        source.set(key.lstrip("+"), value)
    there = spelled_out(parse_recipe(from_source(source, "verl").recipe, "recipe"))
    here = spelled_out(recipe)
    differences = []
    for name in {**here, **there}:
        value, other = here.get(name), there.get(name)
        if value != other:
            # A run with `error` has no long prompts, so that it does not matter how verl cuts them.
            matters = changes(name) and (name, value) != NO_LONG_PROMPTS
            differences.append(FieldDifference(name, value, other, matters))
    return Exported(program, overrides, differences)


def spelled_out(recipe: Recipe) -> dict[str, Any]:
    """Every field as the run uses it: what null stands for, and nothing that has no effect."""
    whole = resolved(recipe)
    options = (whole.get("rollout") or {}).pop("engine_options", None)  # one field, whatever is in it
    values = flatten(whole) | ({"rollout.engine_options": options} if options else {})
    algorithm = recipe.algorithm
    if isinstance(algorithm, OnlineSection):
        values["algorithm.loss.aggregation"] = algorithm.loss.aggregates
        values["algorithm.mini_batch_size"] = algorithm.mini_batch_size or recipe.data.batch_size
        values.pop("cluster", None)
        values |= flatten({"cluster": (recipe.cluster or ClusterSection()).model_dump(mode="json")})
        unused = [f"loss.{name}" for name in LOSS_OPTIONS if name not in algorithm.loss.options]
        if algorithm.distillation.path is None:
            unused += ["distillation.loss", "distillation.coefficient", "distillation.task_rewards"]
        unused += ["kl.coefficient", "kl.estimator"] if algorithm.kl.place == "off" else []
        unused += ["kl.target", "kl.horizon"] if algorithm.kl.controller == "fixed" else []
        for field in unused:
            values.pop(f"algorithm.{field}", None)
    if isinstance(algorithm, PpoSection):
        values["algorithm.critic.path"] = algorithm.critic.path or recipe.model.path
        values["algorithm.critic.aggregation"] = algorithm.critic.aggregation or algorithm.loss.aggregates
    if recipe.optimizer.warmup_steps is not None:
        values.pop("optimizer.warmup_ratio", None)
    if not recipe.model.lora.rank:
        for field in ("alpha", "targets", "dropout"):
            values.pop(f"model.lora.{field}", None)
    return {name: value for name, value in values.items() if value not in (None, {})}


def _shared(recipe: Recipe) -> dict[str, Any]:
    data, trainer, observe, ranks = recipe.data, recipe.trainer, recipe.observe, recipe.device.ranks
    machines = ranks // PER_MACHINE if ranks > PER_MACHINE and ranks % PER_MACHINE == 0 else 1
    return {
        "data.train_files": data.train,
        "data.val_files": data.validation,
        "data.train_batch_size": data.batch_size,
        "trainer.total_epochs": trainer.epochs,
        "trainer.total_training_steps": trainer.steps,
        "trainer.test_freq": trainer.validate_every or -1,
        "trainer.save_freq": trainer.save_every or -1,
        "trainer.resume_mode": "disable" if trainer.resume == "never" else "auto",
        "trainer.nnodes": machines,
        "trainer.n_gpus_per_node": ranks // machines,
        "trainer.project_name": observe.project,
        "trainer.experiment_name": recipe.name,
        "trainer.default_local_dir": recipe.output,
        "trainer.logger": list(observe.loggers),
    }


def _online(recipe: Recipe) -> dict[str, Any]:
    algorithm, rollout, data, optimizer = recipe.algorithm, recipe.rollout, recipe.data, recipe.optimizer
    assert isinstance(algorithm, Online) and rollout is not None
    context, cluster = recipe.device.mesh.context, recipe.cluster or ClusterSection()
    values = {
        "algorithm.adv_estimator": _key(ESTIMATORS, algorithm.name),
        **_shared(recipe),
        "trainer.val_before_train": recipe.trainer.validate_first,
        "trainer.max_actor_ckpt_to_keep": recipe.trainer.keep_checkpoints,
        "data.seed": recipe.seed,
        "data.val_max_samples": data.validation_rows or -1,
        "data.shuffle": data.shuffle,
        "data.prompt_key": data.prompt_key,
        "data.max_prompt_length": data.max_length,
        "data.max_response_length": rollout.max_tokens,
        "data.filter_overlong_prompts": data.too_long == "drop",
        "data.truncation": next((cut for cut, kept in CUTS.items() if kept == data.too_long), "error"),
        f"{M}.path": recipe.model.path,
        f"{M}.enable_gradient_checkpointing": recipe.model.gradient_checkpointing,
        f"{M}.enable_activation_offload": recipe.model.offload.activations,
        f"{M}.lora_rank": recipe.model.lora.rank,
        f"{M}.lora_alpha": recipe.model.lora.alpha,
        f"{M}.target_modules": recipe.model.lora.targets,
        f"{A}.fsdp_config.dtype": recipe.model.dtype,
        f"{A}.fsdp_config.offload_policy": recipe.model.offload.weights,
        f"{A}.fsdp_config.param_offload": cluster.offload,
        f"{A}.fsdp_config.fsdp_size": recipe.device.ranks // recipe.device.mesh.replicas,
        f"{A}.ulysses_sequence_parallel_size": context,
        f"{A}.use_dynamic_bsz": True,
        f"{A}.ppo_max_token_len_per_gpu": data.tokens_per_micro_batch // context,
        f"{A}.ppo_mini_batch_size": algorithm.mini_batch_size or data.batch_size,
        f"{A}.ppo_epochs": algorithm.ppo_epochs,
        f"{OPTIM}.lr": optimizer.lr,
        f"{OPTIM}.betas": list(optimizer.betas),
        f"{OPTIM}.weight_decay": optimizer.weight_decay,
        f"{OPTIM}.clip_grad": optimizer.max_grad_norm,
        f"{OPTIM}.lr_scheduler_type": optimizer.schedule,
        f"{OPTIM}.lr_warmup_steps_ratio": optimizer.warmup_ratio,
        f"{OPTIM}.lr_warmup_steps": optimizer.warmup_steps or -1,
        f"{OPTIM}.min_lr_ratio": optimizer.min_lr_ratio,
        f"{R}.name": rollout.engine,
        f"{R}.dtype": recipe.model.dtype,
        f"{R}.n": rollout.n,
        f"{R}.temperature": rollout.temperature,
        f"{R}.top_p": rollout.top_p,
        f"{R}.top_k": rollout.top_k,
        f"{R}.tensor_model_parallel_size": rollout.tensor_parallel,
        f"{R}.gpu_memory_utilization": rollout.memory_utilization,
        f"{R}.enforce_eager": bool(rollout.eager),
        f"{R}.val_kwargs.n": rollout.validation.n,
        f"{R}.val_kwargs.temperature": rollout.validation.temperature,
        f"{R}.val_kwargs.do_sample": rollout.validation.temperature > 0,
    }
    return {**values, **_engine_options(rollout.engine_options), **_losses(algorithm), **_rewards(recipe)}


def _engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """Where verl has a key of its own it is that one; others are what it passes on to vLLM as they are."""
    known, kwargs = verl_ppo().exact, f"+{R}.engine_kwargs.vllm"
    compilation = options.get("compilation_config", {})
    flat = {name: value for name, value in options.items() if name != "compilation_config"}
    return {
        f"{R if f'{R}.{name}' in known else section}.{name}": value
        for section, values in ((kwargs, flat), (f"{kwargs}.compilation_config", compilation))
        for name, value in values.items()
    }


# verl's loss_mode and use_policy_gradient; it has no other divergences.
DISTILLATION = {
    "policy-gradient": ("k1", True),
    "k2": ("k2", False),
    "k3": ("k3", False),
    "forward-kl": ("forward_kl_topk_tail", False),
}


def _distillation(section: DistillationSection) -> dict[str, Any]:
    if section.path is None or section.loss not in DISTILLATION:
        return {}
    mode, gradient = DISTILLATION[section.loss]
    values = {
        "loss_mode": mode,
        "use_policy_gradient": gradient,
        "use_task_rewards": section.task_rewards,
        "distillation_loss_coef": section.coefficient,
        **({} if section.top_k is None else {"topk": section.top_k}),
        **({} if section.clamp is None else {"loss_max_clamp": section.clamp}),
    }
    return {
        "distillation.enabled": True,
        "distillation.teacher_models.teacher_model.model_path": section.path,
        **{f"distillation.distillation_loss.{name}": value for name, value in values.items()},
    }


def _losses(algorithm: Online) -> dict[str, Any]:
    loss, kl, correction = algorithm.loss, algorithm.kl, algorithm.rollout_correction
    values: dict[str, Any] = {
        f"{A}.policy_loss.loss_mode": _key(LOSSES, loss.name),
        f"{A}.clip_ratio_low": loss.clip_ratio_low,
        f"{A}.clip_ratio_high": loss.clip_ratio_high,
        f"{A}.loss_agg_mode": loss.aggregation or "token-mean",
        f"{A}.entropy_coeff": loss.entropy,
        f"{A}.use_kl_loss": kl.place == "loss",
        "algorithm.use_kl_in_reward": kl.place == "reward",
    }
    bound = loss.max_ratio if "max_ratio" in loss.options else loss.dual_clip
    if bound is not None:
        values[f"{A}.clip_ratio_c"] = bound
    if loss.name == "sapo":
        values |= {f"{A}.tau_pos": loss.tau_pos, f"{A}.tau_neg": loss.tau_neg}
    if kl.place == "loss":
        values |= {f"{A}.kl_loss_coef": kl.coefficient, f"{A}.kl_loss_type": kl.estimator}
    elif kl.place == "reward":
        values |= {"algorithm.kl_ctrl.kl_coef": kl.coefficient, "algorithm.kl_penalty": kl.estimator}
        values |= {"algorithm.kl_ctrl.type": kl.controller, "algorithm.kl_ctrl.target_kl": kl.target}
        values["algorithm.kl_ctrl.horizon"] = kl.horizon
    values |= _distillation(algorithm.distillation)
    if correction.level != "off":
        low, high = correction.lower, correction.upper
        masked = correction.mode == "mask"
        values["algorithm.rollout_correction.rollout_is"] = correction.level
        values["algorithm.rollout_correction.rollout_is_threshold"] = (
            f"{1 / high if low is None else low}_{high}" if masked else high
        )
    if correction.reject:
        values["algorithm.rollout_correction.rollout_rs"] = ",".join(correction.reject)
        # verl bounds the inverse ratio.
        values["algorithm.rollout_correction.rollout_rs_threshold"] = ",".join(
            f"{1 / bound[1]}_{1 / bound[0]}" if isinstance(bound, tuple) else str(bound)
            for bound in correction.reject.values()
        )
    if correction.bypass_mode:
        values["algorithm.rollout_correction.bypass_mode"] = True
        values["algorithm.rollout_correction.loss_type"] = (
            "reinforce" if loss.name == "reinforce" else "ppo_clip"
        )
    if algorithm.router_replay != "disabled":
        values[f"{A}.router_replay.mode"] = algorithm.router_replay
        values[f"{R}.enable_rollout_routing_replay"] = algorithm.router_replay == "R3"
    if algorithm.dynamic_sampling.max_attempts:
        values["algorithm.filter_groups.enable"] = True
        values["algorithm.filter_groups.metric"] = "seq_reward"
        values["algorithm.filter_groups.max_num_gen_batches"] = algorithm.dynamic_sampling.max_attempts + 1
    for name in ("gamma", "lam"):
        if hasattr(algorithm, name):
            values[f"algorithm.{name}"] = getattr(algorithm, name)
    if hasattr(algorithm, "scale_by_std"):
        values["algorithm.norm_adv_by_std_in_grpo"] = algorithm.scale_by_std
    return values


def _rewards(recipe: Recipe) -> dict[str, Any]:
    reward, algorithm = recipe.reward, recipe.algorithm
    values: dict[str, Any] = {}
    if reward is not None and reward.function is not None:
        path, _, name = reward.function.path.rpartition(":")
        values["reward.custom_reward_function.path"] = path
        values["reward.custom_reward_function.name"] = name
    if reward is not None and reward.model is not None:
        values["reward.reward_model.enable"] = True
        values["reward.reward_model.model_path"] = reward.model.path
    if isinstance(algorithm, OnlineSection) and algorithm.overlong.buffer and recipe.rollout is not None:
        # They are not in verl's configuration, so Hydra wants a plus.
        prefix = "+reward.reward_kwargs.overlong_buffer_cfg"
        values |= {"reward.reward_manager.name": "dapo", f"{prefix}.enable": True}
        values |= {f"{prefix}.len": algorithm.overlong.buffer, f"{prefix}.log": False}
        values[f"{prefix}.penalty_factor"] = algorithm.overlong.factor
        values["+reward.reward_kwargs.max_resp_len"] = recipe.rollout.max_tokens
    if isinstance(algorithm, PpoSection):
        critic = algorithm.critic
        values["critic.model.path"] = critic.path or recipe.model.path
        values |= {"critic.optim.lr": critic.lr, "critic.cliprange_value": critic.clip}
        values["trainer.critic_warmup"] = critic.warmup_steps
        values["critic.loss_agg_mode"] = critic.aggregation or algorithm.loss.aggregates
    return values


def _sft(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    data, optimizer, model = recipe.data, recipe.optimizer, recipe.model
    messages = data.format == "messages"
    values = {
        **_shared(recipe),
        "trainer.seed": recipe.seed,
        "trainer.max_ckpt_to_keep": recipe.trainer.keep_checkpoints,
        "data.max_length": data.max_length,
        "data.truncation": {"truncate": "right"}.get(data.too_long, "error"),
        "model.path" if messages else "model.partial_pretrain": model.path,
        "model.enable_gradient_checkpointing": model.gradient_checkpointing,
        "model.lora_rank": model.lora.rank,
        "model.lora_alpha": model.lora.alpha,
        "model.target_modules": model.lora.targets,
        "optim.lr": optimizer.lr,
        "optim.betas": list(optimizer.betas),
        "optim.weight_decay": optimizer.weight_decay,
        "optim.clip_grad": optimizer.max_grad_norm,
        "optim.lr_warmup_steps_ratio": optimizer.warmup_ratio,
        "optim.lr_warmup_steps": optimizer.warmup_steps or -1,
    }
    if messages:
        values |= {"data.messages_key": "messages", "data.use_dynamic_bsz": True}
        values["data.max_token_len_per_gpu"] = data.tokens_per_micro_batch // recipe.device.mesh.context
        values["optim.lr_scheduler_type"] = optimizer.schedule
        values["optim.min_lr_ratio"] = optimizer.min_lr_ratio
        values["engine.ulysses_sequence_parallel_size"] = recipe.device.mesh.context
        return "verl.trainer.sft_trainer", values
    for side, key in (("prompt", data.prompt_key), ("response", data.completion_key)):
        first, *inner = key.split(".")
        values[f"data.{side}_key"] = first
        if inner:
            values[f"+data.{side}_dict_keys"] = inner
    values["data.micro_batch_size_per_gpu"] = max(1, data.tokens_per_micro_batch // data.max_length)
    values["optim.lr_scheduler"] = optimizer.schedule
    return "verl.trainer.fsdp_sft_trainer", values


def _key(names: dict[str, str], value: str) -> str:
    return next(theirs for theirs, ours in names.items() if ours == value)


def _hydra(value: Any) -> str:
    """A value as Hydra's grammar reads it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "True", False: "False"}[value]
    if isinstance(value, list):
        return f"[{','.join(_hydra(item) for item in value)}]"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) and value == float(f"{value:g}") else str(value)
    text = str(value)
    if re.fullmatch(r"[\w./~@+-]+", text) and not re.fullmatch(r"(?i)null|true|false|[\d.e+-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
