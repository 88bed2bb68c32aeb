"""Recipes for accelerators beside the launch scripts that were published for Ascend, key by key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from isotrain.recipe.library import locate
from isotrain.recipe.load import load_recipe, resolved

QUICK_START = """
algorithm.adv_estimator=grpo data.train_batch_size=128 data.max_prompt_length=512 data.max_response_length=128
data.filter_overlong_prompts=True actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct
actor_rollout_ref.actor.optim.lr=5e-7 actor_rollout_ref.actor.entropy_coeff=0.001
actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.n=5 trainer.critic_warmup=0 devices=8 trainer.test_freq=5 trainer.total_epochs=1
"""
FIRST_SUPPORT = """
algorithm.adv_estimator=grpo data.train_batch_size=16 data.max_prompt_length=512 data.max_response_length=1024
data.filter_overlong_prompts=True actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
actor_rollout_ref.actor.optim.lr=5e-7 critic.optim.lr=9e-6
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 actor_rollout_ref.actor.ppo_mini_batch_size=64
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.2 actor_rollout_ref.rollout.n=5 trainer.critic_warmup=0
devices=16 trainer.test_freq=5 trainer.total_epochs=15
"""
FINE_TUNING = """
data.train_batch_size=512 optim.lr=1e-4 model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct
trainer.total_epochs=1 model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear
"""
QWEN3 = """
algorithm.adv_estimator=grpo data.train_batch_size=256 data.max_prompt_length=512
data.max_response_length=1024 data.filter_overlong_prompts=True actor_rollout_ref.model.path=Qwen/Qwen3-8B
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5 trainer.critic_warmup=0
devices=8 trainer.val_before_train=True trainer.save_freq=5 trainer.test_freq=5 trainer.total_epochs=15
"""
QWEN3_SGLANG = """
algorithm.adv_estimator=grpo data.train_batch_size=16 data.max_prompt_length=512
data.max_response_length=1024 data.filter_overlong_prompts=True actor_rollout_ref.model.path=Qwen/Qwen3-8B
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=16
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.name=sglang
actor_rollout_ref.rollout.gpu_memory_utilization=0.3 actor_rollout_ref.rollout.n=5 trainer.critic_warmup=0
devices=4 ulysses_sequence_parallel_size=4 trainer.save_freq=1000 trainer.test_freq=10000
trainer.total_epochs=5 trainer.val_before_train=False
"""
DAPO = """
algorithm.adv_estimator=grpo data.train_batch_size=16 data.max_prompt_length=2048
data.max_response_length=20480 actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=1
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True
clip_ratio_low=0.2 clip_ratio_high=0.28 clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode=token-mean
filter_groups.max_num_gen_batches=10 overlong_buffer.len=4096 overlong_buffer.penalty_factor=1.0
weight_decay=0.1 lr_warmup_steps=10 grad_clip=1.0 temperature=1.0
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.5 actor_rollout_ref.rollout.n=16 devices=16
ulysses_sequence_parallel_size=4 trainer.val_before_train=True trainer.save_freq=20 trainer.test_freq=5
trainer.total_epochs=1
"""
# What verl takes where a script says nothing.
DEFAULTS = """
betas=[0.9,0.999] weight_decay=0.01 grad_clip=1.0 warmup_style=constant lr_warmup_steps_ratio=0.0
clip_ratio_low=0.2 clip_ratio_high=0.2 clip_ratio_c=3.0 ppo_epochs=1 temperature=1.0 method=strict
"""
KEYS = {
    "algorithm.adv_estimator": "algorithm.name",
    "data.train_batch_size": "data.batch_size",
    "data.max_prompt_length": "data.max_length",
    "data.max_response_length": "rollout.max_tokens",
    "data.filter_overlong_prompts": "data.too_long",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.loss.entropy",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "algorithm.mini_batch_size",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "data.tokens_per_micro_batch",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl.place",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl.coefficient",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl.estimator",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor_parallel",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.memory_utilization",
    "actor_rollout_ref.rollout.n": "rollout.n",
    "critic.optim.lr": "algorithm.critic.lr",
    "trainer.critic_warmup": "algorithm.critic.warmup_steps",
    "devices": "device.ranks",
    "trainer.test_freq": "trainer.validate_every",
    "trainer.total_epochs": "trainer.epochs",
    "optim.lr": "optimizer.lr",
    "model.partial_pretrain": "model.path",
    "model.lora_rank": "model.lora.rank",
    "model.lora_alpha": "model.lora.alpha",
    "model.target_modules": "model.lora.targets",
    "betas": "optimizer.betas",
    "weight_decay": "optimizer.weight_decay",
    "grad_clip": "optimizer.max_grad_norm",
    "warmup_style": "optimizer.schedule",
    "lr_warmup_steps_ratio": "optimizer.warmup_ratio",
    "clip_ratio_low": "algorithm.loss.clip_ratio_low",
    "clip_ratio_high": "algorithm.loss.clip_ratio_high",
    "clip_ratio_c": "algorithm.loss.dual_clip",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.loss.aggregation",
    "filter_groups.max_num_gen_batches": "algorithm.dynamic_sampling.max_attempts",
    "overlong_buffer.len": "algorithm.overlong.buffer",
    "overlong_buffer.penalty_factor": "algorithm.overlong.factor",
    "ulysses_sequence_parallel_size": "device.mesh.context",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "trainer.val_before_train": "trainer.validate_first",
    "trainer.save_freq": "trainer.save_every",
    "ppo_epochs": "algorithm.ppo_epochs",
    "temperature": "rollout.temperature",
    "method": "reward.gsm8k.method",
}
WORDS: dict[str, Callable[[Any], Any]] = {
    "data.too_long": {True: "drop"}.__getitem__,
    "algorithm.kl.place": {True: "loss"}.__getitem__,
    "algorithm.kl.estimator": {"low_var_kl": "k3"}.__getitem__,
}
# GRPO has no critic, whatever a script says of one.
NO_WARM_UP = {"algorithm.critic.warmup_steps": None}
NO_CRITIC = {"algorithm.critic.lr": None, **NO_WARM_UP}
ONE_MACHINE = {"data.batch_size": 128, "rollout.n": 1, "algorithm.kl.place": "off", "device.ranks": 8}
# Recipe, script, and what its header says is otherwise.
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gsm8k-grpo-8x": (QUICK_START + DEFAULTS, NO_WARM_UP),
    "gsm8k-grpo-2x8": (FIRST_SUPPORT + DEFAULTS, {**NO_CRITIC, "algorithm.mini_batch_size": None}),
    "gsm8k-ppo-8x": (FIRST_SUPPORT + DEFAULTS, {**ONE_MACHINE, "algorithm.name": "ppo"}),
    "gsm8k-reinforce++-8x": (
        FIRST_SUPPORT + DEFAULTS,
        {**NO_CRITIC, **ONE_MACHINE, "algorithm.name": "reinforce++"},
    ),
    "gsm8k-sft-lora-8x": (FINE_TUNING, {}),
    "qwen3-8b-grpo-8x": (QWEN3 + DEFAULTS, NO_WARM_UP),
    "qwen3-8b-grpo-sglang-4x": (
        QWEN3_SGLANG + DEFAULTS,
        {**NO_WARM_UP, "trainer.validate_every": 20, "trainer.save_every": 20},
    ),
    "dapo-qwen2.5-7b-16x": (DAPO, {}),
    "dapo-qwen3-8b-16x": (DAPO, {"model.path": "Qwen/Qwen3-8B-Base"}),
}


def published(script: str) -> dict[str, Any]:
    """What a recipe with this script's values would say."""
    values = {}
    for setting in script.split():
        key, _, text = setting.partition("=")
        # YAML takes 5e-7 for a word.
        value = float(text) if "e-" in text and text[0].isdigit() else yaml.safe_load(text)
        values[KEYS[key]] = WORDS.get(KEYS[key], lambda same: same)(value)
    return values


def value_at(recipe: Any, key: str) -> Any:
    for part in key.split("."):
        recipe = None if recipe is None else recipe.get(part)
    return recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_published_values_but_for_what_its_header_says(name: str) -> None:
    script, otherwise = RECIPES[name]
    recipe = resolved(load_recipe(locate(name)))
    wanted = published(script)
    assert {key: value_at(recipe, key) for key in wanted} == wanted | otherwise
    # An exception that is none any more must go from the table and from the header.
    assert not [key for key, value in otherwise.items() if wanted.get(key, value) == value]


@pytest.mark.parametrize("name", [name for name in RECIPES if "sft" not in name])
def test_engines_take_every_device(name: str) -> None:
    recipe = load_recipe(locate(name))
    rollout, ranks = recipe.rollout, recipe.device.ranks
    assert rollout is not None
    assert rollout.engine_count(ranks, "colocated") * rollout.tensor_parallel == ranks
