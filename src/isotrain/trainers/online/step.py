"""One rank's trajectories of a step, and the maths that turns scores into losses on them.

R: trajectories of a micro-batch, N: their response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from isotrain.algorithms.advantages import Estimator, Moments, combine, moments, whitened
from isotrain.algorithms.aggregation import Loss, LossNormalizer
from isotrain.algorithms.distillation import (
    distillation_advantages,
    distillation_loss,
    sampled_divergence,
)
from isotrain.algorithms.distillation import divergence as divergence_of
from isotrain.algorithms.kl import KL_ESTIMATORS, kl_loss
from isotrain.algorithms.mismatch import Mismatch, mismatch, rollout_correction
from isotrain.algorithms.policy_losses import entropy_bonus, value_loss
from isotrain.algorithms.rewards import token_rewards
from isotrain.algorithms.segments import spread, sums
from isotrain.data.packing import PolicyBatch
from isotrain.engine.engine import InferenceModel, UpdateResult
from isotrain.models.packed import ScalarHead, TokenHead
from isotrain.trainers.online.messages import Totals


@dataclass(frozen=True)
class UpdateSettings:
    """All inputs of a policy update besides the responses."""

    temperature: float
    ppo_epochs: int
    loss: Callable[..., Loss]
    loss_options: dict[str, Any]
    aggregation: str
    critic_aggregation: str
    horizon: int
    entropy: float
    kl_place: str
    kl_estimator: str
    correction: dict[str, Any] | None
    bypass: bool
    """Whether the engine's log-probs are the old ones."""
    distillation: DistillationSettings | None = None


@dataclass(frozen=True)
class DistillationSettings:
    loss: str
    over_vocabulary: bool
    top_k: int | None
    coefficient: float
    clamp: float | None
    task_rewards: bool

    def clamped(self, values_N: torch.Tensor) -> torch.Tensor:
        return values_N if self.clamp is None else values_N.clamp(-self.clamp, self.clamp)


@dataclass(frozen=True)
class AdvantageSettings:
    estimator: Estimator
    options: dict[str, Any]
    whitening: Literal["verl", "openrlhf"]
    environment_weight: float = 0.0
    """The weight of environments' rewards for turns in the scores."""


@dataclass
class Micro:
    """A micro-batch and what is learnt about it on the way from scores to losses."""

    batch: PolicyBatch
    old_logp_N: torch.Tensor | None = None
    """None where the first update is the only one: the policy's own log-probs are the old ones then."""
    ref_logp_N: torch.Tensor | None = None
    teacher_logp_N: torch.Tensor | None = None
    values_N: torch.Tensor | None = None
    advantages_N: torch.Tensor | None = None
    returns_N: torch.Tensor | None = None
    mismatch: Mismatch | None = None

    def share(self, totals: Totals, horizon: int | None = None) -> LossNormalizer:
        return LossNormalizer(self.batch.mask_N, self.batch.lengths, totals.tokens, totals.sequences, horizon)

    def per_trajectory(self, values: Mapping[int, float]) -> torch.Tensor:
        """Numbers by trajectory as a tensor in the order of this micro-batch."""
        return torch.tensor(
            [values[i] for i in self.batch.index], dtype=torch.float32, device=self.batch.mask_N.device
        )


class Span(NamedTuple):
    """Sums and extremes of some values under the mask, which combine over micro-batches and ranks."""

    number: float
    total: float
    largest: float
    least: float

    def metrics(self, name: str) -> dict[str, float]:
        if not self.number:
            return {}
        return {
            f"{name}/mean": self.total / self.number,
            f"{name}/max": self.largest,
            f"{name}/min": self.least,
        }


def span(values_N: torch.Tensor, mask_N: torch.Tensor) -> Span:
    values = values_N[mask_N].detach().float().cpu()  # where there is float64 for the sum
    if not len(values):
        return Span(0.0, 0.0, -math.inf, math.inf)
    return Span(float(len(values)), values.double().sum().item(), values.max().item(), values.min().item())


def join_spans(parts: Iterable[Span]) -> Span:
    parts = list(parts)
    return Span(
        math.fsum(p.number for p in parts),
        math.fsum(p.total for p in parts),
        max(p.largest for p in parts),
        min(p.least for p in parts),
    )


class AdvantageMetrics(NamedTuple):
    """One rank's part of the metrics of a step's advantages."""

    spans: dict[str, Span]
    critic: tuple[Moments, Moments] | None


def penalties(micro: Micro, logp_N: torch.Tensor, estimator: str) -> list[tuple[int, float, float]]:
    """Number, summed divergence from the reference, and its mean over tokens, for each trajectory."""
    assert micro.ref_logp_N is not None
    kl_N = divergence(micro, logp_N, estimator)
    sums_R = sums(kl_N, micro.batch.lengths).tolist()
    counts_R = sums(micro.batch.mask_N.float(), micro.batch.lengths).clamp(min=1).tolist()
    return [(i, s, s / n) for i, s, n in zip(micro.batch.index, sums_R, counts_R, strict=True)]


def divergence(micro: Micro, logp_N: torch.Tensor, estimator: str) -> torch.Tensor:
    assert micro.ref_logp_N is not None
    kl_N = KL_ESTIMATORS[estimator](logp_N.detach(), micro.ref_logp_N)
    return torch.where(micro.batch.mask_N, kl_N, 0.0)


def estimate(
    micros: Sequence[Micro],
    settings: AdvantageSettings,
    *,
    scores: Mapping[int, float],
    trajectory_advantages: Mapping[int, float] | None,
    greedy: Mapping[int, float] | None,
    kl_estimator: str,
    kl_coefficient: float,
) -> None:
    """Fill in advantages and returns of all micro-batches, before any whitening.

    Estimators per trajectory were run where all groups are together; here they are only spread over tokens.
    """
    if trajectory_advantages is not None:
        for micro in micros:
            whole_N = spread(micro.per_trajectory(trajectory_advantages), micro.batch.lengths)
            micro.advantages_N = micro.returns_N = torch.where(micro.batch.mask_N, whole_N, 0.0)
        return
    columns: dict[str, list[torch.Tensor]] = {"rewards_N": [], "mask_N": [], "values_N": [], "greedy_R": []}
    for micro in micros:
        kl_N = None
        if kl_coefficient and micro.ref_logp_N is not None:
            assert micro.old_logp_N is not None
            kl_N = divergence(micro, micro.old_logp_N, kl_estimator)
        scores_R, mask_N, lengths = micro.per_trajectory(scores), micro.batch.mask_N, micro.batch.lengths
        by_turn = _by_turn(micro.batch, settings.environment_weight)
        columns["rewards_N"].append(
            token_rewards(scores_R, mask_N, lengths, kl_N=kl_N, kl_coefficient=kl_coefficient, **by_turn)
        )
        columns["mask_N"].append(mask_N)
        if micro.values_N is not None:
            columns["values_N"].append(micro.values_N)
        if greedy is not None:
            columns["greedy_R"].append(micro.per_trajectory(greedy))
    _estimate_tokens(micros, settings, columns)


def _by_turn(batch: PolicyBatch, weight: float) -> dict[str, torch.Tensor]:
    """The parts of the scores that belong to single turns of episodes."""
    if batch.turn_rewards_N is None or not weight:
        return {}
    earlier_R = torch.tensor(batch.earlier, dtype=torch.float32)
    return {"turn_rewards_N": weight * batch.turn_rewards_N, "earlier_R": weight * earlier_R}


def _estimate_tokens(
    micros: Sequence[Micro], settings: AdvantageSettings, columns: Mapping[str, Sequence[torch.Tensor]]
) -> None:
    """One call for all micro-batches: recursions go back token by token, in all trajectories at once."""
    needed = ("rewards_N", "mask_N", *settings.estimator.needs)
    rewards_N, mask_N, *extra = (torch.cat(list(columns[name])) for name in needed)
    lengths = [length for micro in micros for length in micro.batch.lengths]
    sizes = [len(micro.batch.mask_N) for micro in micros]
    estimates = settings.estimator.function(rewards_N, mask_N, lengths, *extra, **settings.options)
    advantages, returns = (whole_N.split(sizes) for whole_N in estimates)
    for micro, advantages_N, returns_N in zip(micros, advantages, returns, strict=True):
        micro.advantages_N, micro.returns_N = advantages_N, returns_N


def policy_mismatch(micro: Micro, old_logp_N: torch.Tensor | None) -> Mismatch:
    """How far the engine's log-probs are from those of the policy at the start of the step."""
    assert old_logp_N is not None
    return mismatch(old_logp_N, micro.batch.rollout_logp_N, micro.batch.mask_N)


def whiten_all(
    micros: Sequence[Micro], settings: AdvantageSettings, total: Callable[[Sequence[float]], list[float]]
) -> None:
    """Whiten the advantages over the tokens of the whole step; `total` sums over ranks."""
    by_micro = [moments(m.advantages_N, m.batch.mask_N) for m in micros if m.advantages_N is not None]
    of = Moments(*total(list(combine(by_micro))))
    for micro in micros:
        assert micro.advantages_N is not None
        micro.advantages_N = whitened(
            micro.advantages_N, micro.batch.mask_N, of, convention=settings.whitening
        )


def critic_moments(micros: Sequence[Micro]) -> tuple[Moments, Moments]:
    """Moments of the returns, and of what the critic left unexplained of them."""
    returns, residuals = [], []
    for micro in micros:
        assert micro.returns_N is not None and micro.values_N is not None
        returns.append(moments(micro.returns_N, micro.batch.mask_N))
        residuals.append(moments(micro.returns_N - micro.values_N, micro.batch.mask_N))
    return combine(returns), combine(residuals)


def policy_objective(
    micro: Micro,
    totals: Totals,
    settings: UpdateSettings,
    kl_coefficient: float,
    teacher: InferenceModel | None = None,
) -> Callable[[TokenHead], Loss]:
    """The policy's loss on one micro-batch, as a share of its mini-batch's."""

    def objective(head: TokenHead) -> Loss:
        logp_N, entropy_N = head.logps_and_entropies(settings.temperature)
        share = micro.share(totals, settings.horizon)
        old_logp_N = logp_N.detach() if micro.old_logp_N is None else micro.old_logp_N
        if micro.mismatch is None:
            micro.mismatch = policy_mismatch(micro, old_logp_N)
        corrected_N = old_logp_N
        if settings.bypass:
            corrected_N, old_logp_N = logp_N.detach(), micro.batch.rollout_logp_N
        metrics: dict[str, torch.Tensor] = {}
        weights_N = None
        if settings.correction is not None:
            weights_N, metrics = rollout_correction(
                corrected_N, micro.batch.rollout_logp_N, share, **settings.correction
            )
        assert micro.advantages_N is not None

        def policy_loss(advantages_N: torch.Tensor) -> Loss:
            options = {
                "aggregation": settings.aggregation,
                "correction_N": weights_N,
                **settings.loss_options,
            }
            return settings.loss(logp_N, old_logp_N, advantages_N, share, **options)

        distillation = settings.distillation
        terms: list[Loss] = []
        if distillation is not None:
            terms += _distillation_terms(
                head, micro, teacher, settings, share, logp_N, corrected_N, policy_loss
            )
        if distillation is None or distillation.task_rewards:
            terms.append(policy_loss(micro.advantages_N))  # last: metrics of the policy loss are these
        # Without a bonus the entropy is only looked at: no second pass over the logits for its gradient.
        entropy_N = entropy_N if settings.entropy else entropy_N.detach()
        terms.append(
            entropy_bonus(entropy_N, share, coefficient=settings.entropy, aggregation=settings.aggregation)
        )
        if settings.kl_place == "loss":
            assert micro.ref_logp_N is not None
            terms.append(
                kl_loss(
                    logp_N,
                    micro.ref_logp_N,
                    share,
                    coefficient=kl_coefficient,
                    estimator=settings.kl_estimator,
                    aggregation=settings.aggregation,
                )
            )
        (loss, term_metrics), *others = terms
        metrics |= term_metrics
        for term, term_metrics in others:
            loss, metrics = loss + term, metrics | term_metrics
        return loss, metrics

    return objective


def _distillation_terms(
    head: TokenHead,
    micro: Micro,
    teacher: InferenceModel | None,
    settings: UpdateSettings,
    share: LossNormalizer,
    logp_N: torch.Tensor,
    policy_logp_N: torch.Tensor,
    policy_loss: Callable[[torch.Tensor], Loss],
) -> Iterator[Loss]:
    """The loss against the teacher; `policy_logp_N` are log-probs of the policy before the step's updates."""
    how = settings.distillation
    assert how is not None and teacher is not None
    if how.over_vocabulary:
        # Both heads are whole here, inside of the policy's forward pass: their logits meet chunk by chunk.
        compare = partial(divergence_of, how.loss, how.top_k)
        with torch.no_grad():
            teacher_head = teacher.forward(micro.batch.packed, lambda other: other)
        divergence_N = head.divergences(teacher_head, compare, settings.temperature)
    elif how.loss == "policy-gradient":
        assert micro.teacher_logp_N is not None
        advantages_N = how.clamped(distillation_advantages(policy_logp_N, micro.teacher_logp_N))
        loss, metrics = policy_loss(advantages_N)
        yield how.coefficient * loss, metrics | {"actor/distillation_loss": share.mean(-advantages_N)}
        return
    else:
        assert micro.teacher_logp_N is not None
        divergence_N = sampled_divergence(logp_N, micro.teacher_logp_N, share, how.loss)
    yield distillation_loss(
        how.clamped(divergence_N), share, coefficient=how.coefficient, aggregation=settings.aggregation
    )


def critic_objective(
    micro: Micro, totals: Totals, settings: UpdateSettings, clip: float | None
) -> Callable[[ScalarHead], Loss]:
    """The critic's loss on one micro-batch, as a share of its mini-batch's."""

    def objective(head: ScalarHead) -> Loss:
        assert micro.values_N is not None and micro.returns_N is not None
        return value_loss(
            head.values(),
            micro.values_N,
            micro.returns_N,
            micro.share(totals, settings.horizon),
            clip=clip,
            aggregation=settings.critic_aggregation,
        )

    return objective


def update_means(results: Sequence[UpdateResult], name: str) -> dict[str, float]:
    """Metrics averaged over the updates of a step; a norm that overflowed is no number, and is left out."""
    total: dict[str, float] = {}
    norms = sum(not result.overflowed for result in results)
    for result in results:
        metrics = {}
        if not result.overflowed:
            metrics[f"{name}/grad_norm"] = result.grad_norm * (len(results) / norms)
        if result.router_aux_loss is not None:
            metrics[f"{name}/router_aux_loss"] = result.router_aux_loss
        for key, value in {**result.metrics, **metrics}.items():
            total[key] = total.get(key, 0.0) + value / len(results)
    total |= {f"{name}/{key}": value for key, value in results[-1].scale_metrics.items()}
    total[f"{name}/skipped"] = float(sum(not (result.applied or result.overflowed) for result in results))
    return total
