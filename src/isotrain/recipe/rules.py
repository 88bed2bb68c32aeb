"""Rules between the sections of an online recipe."""

from __future__ import annotations

from collections.abc import Iterator

from isotrain.language import tr
from isotrain.recipe.online import ClusterSection, OnlineSection, RewardSection, RolloutSection
from isotrain.recipe.policy_loss import KlSection

# Of vLLM's options, those that change memory and speed, and numbers by their rounding at most. How graphs are
# captured is part of `compilation_config`.
ENGINE_OPTIONS = frozenset(
    (
        "async_scheduling",
        "block_size",
        "compilation_config",
        "enable_expert_parallel",
        "max_num_batched_tokens",
        "max_num_seqs",
    )
)


def broken_rules(
    algorithm: OnlineSection,
    rollout: RolloutSection,
    reward: RewardSection,
    cluster: ClusterSection,
    *,
    ranks: int,
    batch_size: int,
    max_prompt: int,
    token_budget: int,
    other_layers: str | None = None,
) -> Iterator[str]:
    """One line for each rule that an online recipe breaks, with the keys to change.

    `other_layers` is the field of `model` that lets ranks compute layers in another way than an engine.
    """
    yield from _sampling(algorithm, rollout, batch_size)
    yield from _lengths(algorithm, rollout, max_prompt, token_budget)
    yield from _controller(algorithm.kl, batch_size * rollout.n)
    yield from _devices(ranks, rollout, cluster)
    yield from _rewards(algorithm, reward)
    if rollout.exact:
        yield from _exact(rollout, other_layers)
    if algorithm.router_replay != "disabled":
        yield from _replay(algorithm, rollout, compiled=other_layers == "compile")
    if reward.environment is not None and rollout.episodes is None:
        yield tr(
            "reward.environment needs one who gives it: set rollout.environment.path, or rollout.agent.path"
        )
    if rollout.environment is not None and rollout.agent is not None:
        yield tr("rollout.agent calls the policy by itself: remove rollout.environment, or rollout.agent")


def _exact(rollout: RolloutSection, other_layers: str | None) -> Iterator[str]:
    if rollout.engine != "hf":
        yield tr(
            "rollout.exact (true) needs the trainer's kernels, which rollout.engine {engine} does not have: "
            "set engine: hf, or remove exact",
            engine=rollout.engine,
        )
    if rollout.in_flight:
        yield tr(
            "rollout.exact (true) draws a response from one version of the weights, rollout.in_flight "
            "(true) from several: remove one of the two"
        )
    if other_layers:
        yield tr(
            "rollout.exact (true) cannot be used with model.{field}: the engine computes whole layers "
            "without it, and rounds in another way: remove one of the two",
            field=other_layers,
        )


def _replay(algorithm: OnlineSection, rollout: RolloutSection, compiled: bool) -> Iterator[str]:
    mode = algorithm.router_replay
    if mode == "R3" and (rollout.engine != "hf" or rollout.exact):
        yield tr(
            "algorithm.router_replay (R3) takes routes from rollout.engine hf alone, and with exact there "
            "are no others than the trainer's: set engine: hf without exact, or router_replay: R2 or disabled"
        )
    if mode == "R2" and algorithm.rollout_correction.bypass_mode:
        yield tr(
            "algorithm.router_replay (R2) takes routes of the pass for old log-probs, which "
            "rollout_correction.bypass_mode leaves out: set R3, or remove one of the two"
        )
    if compiled:
        yield tr("algorithm.router_replay ({mode}) cannot be used with model.compile: remove one", mode=mode)


def _sampling(algorithm: OnlineSection, rollout: RolloutSection, batch_size: int) -> Iterator[str]:
    if algorithm.name in ("grpo", "rloo", "reinforce++-baseline") and rollout.n < 2:
        yield tr(
            "rollout.n ({n}) is too small: {name} compares responses, set 2 or more",
            n=rollout.n,
            name=algorithm.name,
        )
    if (algorithm.mini_batch_size or 0) > batch_size:
        yield tr(
            "algorithm.mini_batch_size ({mini_batch_size}) is above data.batch_size "
            "({batch_size}): lower it, or remove it",
            mini_batch_size=algorithm.mini_batch_size,
            batch_size=batch_size,
        )
    if rollout.validation.n > 1 and rollout.validation.temperature == 0:
        yield tr(
            "rollout.validation.n ({n}) would repeat one greedy response: set "
            "rollout.validation.temperature, or n: 1",
            n=rollout.validation.n,
        )
    cut = "top_p" if rollout.top_p < 1 else "top_k" if rollout.top_k > 0 else None
    correction = algorithm.rollout_correction
    of_responses = [
        *([f"level ({correction.level})"] if correction.level in ("sequence", "geometric") else []),
        *(f"reject.{name}" for name in correction.reject if name.startswith("seq")),
    ]
    if of_responses and cut:
        yield tr(
            "algorithm.rollout_correction.{field} cannot be used with rollout.{cut} "
            "({value:g}): the engine normalizes over the kept tokens, the trained model over "
            "all, so the weights of long responses vanish: take tokens ({tokens}), or sample "
            "from all tokens",
            field=of_responses[0],
            cut=cut,
            value=getattr(rollout, cut),
            tokens="level: token" if of_responses[0].startswith("level") else "reject: {token_k1: 2.0}",
        )
    if correction.bypass_mode and correction.level != "off" and algorithm.loss.name != "reinforce":
        yield tr(
            "algorithm.rollout_correction.level ({level}) cannot be used with bypass_mode: the ratio of the "
            "{loss} loss has the engine's log-probs already: set level: off, or loss.name: reinforce",
            level=correction.level,
            loss=algorithm.loss.name,
        )


def _lengths(
    algorithm: OnlineSection, rollout: RolloutSection, max_prompt: int, budget: int
) -> Iterator[str]:
    longest = max_prompt + rollout.max_tokens
    if budget < longest:
        yield tr(
            "data.tokens_per_micro_batch ({budget}) is below data.max_length + rollout.max_tokens "
            "({longest}): raise it to at least {longest}",
            budget=budget,
            longest=longest,
        )
    if algorithm.overlong.buffer > rollout.max_tokens:
        yield tr(
            "algorithm.overlong.buffer ({buffer}) is above rollout.max_tokens ({max_tokens}): lower it",
            buffer=algorithm.overlong.buffer,
            max_tokens=rollout.max_tokens,
        )


def _devices(ranks: int, rollout: RolloutSection, cluster: ClusterSection) -> Iterator[str]:
    if rollout.staleness and cluster.placement != "separate":
        yield tr(
            "rollout.staleness ({staleness}) lets engines run during training, which needs "
            "separate devices: set cluster.placement: separate",
            staleness=rollout.staleness,
        )
    if rollout.in_flight and not rollout.staleness:
        yield tr(
            "rollout.in_flight (true) updates weights during generation, but with "
            "rollout.staleness (0) generation ends before training begins: set staleness to 1 or "
            "more, or remove in_flight"
        )
    if rollout.in_flight and rollout.engine == "sglang":
        yield tr(
            "rollout.in_flight (true) cannot be used with rollout.engine sglang, which takes "
            "weights between responses: set engine: vllm, or remove in_flight"
        )
    if rollout.engine_options and rollout.engine != "vllm":
        yield tr("rollout.engine_options are options of vLLM: set engine: vllm, or remove them")
    for name in sorted(set(rollout.engine_options) - ENGINE_OPTIONS):
        yield tr(
            "rollout.engine_options.{name} cannot be set: known are {names}",
            name=name,
            names=", ".join(sorted(ENGINE_OPTIONS)),
        )
    if rollout.engine == "hf" and rollout.tensor_parallel > 1:
        yield tr(
            "rollout.tensor_parallel ({tensor_parallel}) cannot be used with rollout.engine hf, "
            "which runs on one device: remove it",
            tensor_parallel=rollout.tensor_parallel,
        )
    engines = rollout.engine_count(ranks, cluster.placement)
    needed = engines * rollout.tensor_parallel
    if rollout.generates and cluster.placement == "colocated" and needed > ranks:
        yield tr(
            "device.ranks ({ranks}) is below {wanted}, the number of devices that rollout.engines "
            "({engines}) with rollout.tensor_parallel ({tensor_parallel}) share with training: "
            "raise it, lower one of the others, or set cluster.placement: separate",
            ranks=ranks,
            wanted=needed,
            engines=engines,
            tensor_parallel=rollout.tensor_parallel,
        )


def _controller(kl: KlSection, responses: int) -> Iterator[str]:
    """Each step changes the coefficient by the factor `1 - 0.2 responses / horizon` at the least."""
    if kl.controller == "adaptive" and responses >= 5 * kl.horizon:
        yield tr(
            "algorithm.kl.horizon ({horizon}) is too short: one step of {responses} responses "
            "could take the coefficient to 0 or below: set more than {least}",
            horizon=kl.horizon,
            responses=responses,
            least=responses // 5,
        )


def _rewards(algorithm: OnlineSection, reward: RewardSection) -> Iterator[str]:
    scorer = next(iter(reward.reward_models), None)
    if algorithm.dynamic_sampling.max_attempts and scorer:
        yield tr(
            "algorithm.dynamic_sampling.max_attempts needs rewards before responses reach the "
            "training ranks, where reward.{scorer} runs: use one of the two",
            scorer=scorer,
        )
    if algorithm.name == "remax" and scorer:
        yield tr(
            "reward.{scorer} cannot be used with remax, whose greedy responses never reach the "
            "ranks: use another algorithm or another reward",
            scorer=scorer,
        )
