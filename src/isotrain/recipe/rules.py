"""Rules between the sections of an online recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from isotrain.recipe.online import ClusterSection, KlSection, OnlineSection, RewardSection, RolloutSection

if TYPE_CHECKING:
    from isotrain.recipe.schema import Recipe


def broken_rules(
    recipe: Recipe, algorithm: OnlineSection, rollout: RolloutSection, reward: RewardSection
) -> Iterator[str]:
    """One line for each rule that an online recipe breaks, with the keys to change."""
    data = recipe.data
    yield from _sampling(algorithm, rollout, data.batch_size)
    yield from _lengths(algorithm, rollout, data.max_length, data.tokens_per_micro_batch)
    yield from _controller(algorithm.kl, data.batch_size * rollout.n)
    yield from _devices(recipe.device.ranks, rollout, recipe.cluster or ClusterSection())
    yield from _rewards(algorithm, reward)
    if reward.environment is not None and rollout.episodes is None:
        yield "reward.environment needs one who gives it: set rollout.environment.path, or rollout.agent.path"
    if rollout.environment is not None and rollout.agent is not None:
        yield "rollout.agent calls the policy by itself: remove rollout.environment, or rollout.agent"


def _sampling(algorithm: OnlineSection, rollout: RolloutSection, batch_size: int) -> Iterator[str]:
    if algorithm.name in ("grpo", "rloo", "reinforce++-baseline") and rollout.n < 2:
        yield f"rollout.n ({rollout.n}) is too small: {algorithm.name} compares responses, set 2 or more"
    if (algorithm.mini_batch_size or 0) > batch_size:
        yield (
            f"algorithm.mini_batch_size ({algorithm.mini_batch_size}) is above "
            f"data.batch_size ({batch_size}): lower it, or remove it"
        )
    if rollout.validation.n > 1 and rollout.validation.temperature == 0:
        yield (
            f"rollout.validation.n ({rollout.validation.n}) would repeat one greedy response: set "
            "rollout.validation.temperature, or n: 1"
        )
    cut = "top_p" if rollout.top_p < 1 else "top_k" if rollout.top_k > 0 else None
    if algorithm.rollout_correction.level == "sequence" and cut:
        yield (
            f"algorithm.rollout_correction.level (sequence) cannot be used with rollout.{cut} "
            f"({getattr(rollout, cut):g}): the engine normalizes over the kept tokens, the trained model "
            "over all, so the weights of long responses vanish: set level: token, or sample from all tokens"
        )


def _lengths(
    algorithm: OnlineSection, rollout: RolloutSection, max_prompt: int, budget: int
) -> Iterator[str]:
    longest = max_prompt + rollout.max_tokens
    if budget < longest:
        yield (
            f"data.tokens_per_micro_batch ({budget}) is below "
            f"data.max_length + rollout.max_tokens ({longest}): raise it to at least {longest}"
        )
    if algorithm.overlong.buffer > rollout.max_tokens:
        yield (
            f"algorithm.overlong.buffer ({algorithm.overlong.buffer}) is above rollout.max_tokens "
            f"({rollout.max_tokens}): lower it"
        )


def _devices(ranks: int, rollout: RolloutSection, cluster: ClusterSection) -> Iterator[str]:
    if rollout.staleness and cluster.placement != "separate":
        yield (
            f"rollout.staleness ({rollout.staleness}) lets engines run during training, which needs "
            "separate devices: set cluster.placement: separate"
        )
    if rollout.in_flight and not rollout.staleness:
        yield (
            "rollout.in_flight (true) updates weights during generation, but with rollout.staleness (0) "
            "generation ends before training begins: set staleness to 1 or more, or remove in_flight"
        )
    if rollout.in_flight and rollout.engine == "sglang":
        yield (
            "rollout.in_flight (true) cannot be used with rollout.engine sglang, which takes weights between "
            "responses: set engine: vllm, or remove in_flight"
        )
    if rollout.engine == "hf" and rollout.tensor_parallel > 1:
        yield (
            f"rollout.tensor_parallel ({rollout.tensor_parallel}) cannot be used with rollout.engine hf, "
            "which runs on one device: remove it"
        )
    engines = rollout.engine_count(ranks, cluster.placement)
    wanted = engines * rollout.tensor_parallel
    if rollout.generates and cluster.placement == "colocated" and wanted > ranks:
        yield (
            f"device.ranks ({ranks}) is below {wanted}, the number of devices that rollout.engines "
            f"({engines}) with rollout.tensor_parallel ({rollout.tensor_parallel}) share with "
            "training: raise it, lower one of the others, or set cluster.placement: separate"
        )


def _controller(kl: KlSection, responses: int) -> Iterator[str]:
    """Each step changes the coefficient by the factor `1 - 0.2 responses / horizon` at the least."""
    if kl.controller == "adaptive" and responses >= 5 * kl.horizon:
        yield (
            f"algorithm.kl.horizon ({kl.horizon}) is too short: one step of {responses} responses could take "
            f"the coefficient to 0 or below: set more than {responses // 5}"
        )


def _rewards(algorithm: OnlineSection, reward: RewardSection) -> Iterator[str]:
    scorer = reward.reward_models[0] if reward.reward_models else None
    if algorithm.dynamic_sampling.max_attempts and scorer:
        yield (
            "algorithm.dynamic_sampling.max_attempts needs rewards before responses reach the training "
            f"ranks, where reward.{scorer} runs: use one of the two"
        )
    if algorithm.name == "remax" and scorer:
        yield (
            f"reward.{scorer} cannot be used with remax, whose greedy responses never reach the ranks: use "
            "another algorithm or another reward"
        )
