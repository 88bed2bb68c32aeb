"""Learning from preference items: pairs, single responses, or the steps of solutions; reference log-probs.

S: samples of a micro-batch, of pairs chosen and rejected in turn; P: its pairs; N: ends of its steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isotrain.algorithms.aggregation import Loss
from isotrain.algorithms.preference_losses import (
    PairLosses,
    Side,
    calibration_sums,
    kto,
    prm,
    reference_point,
    rm,
    shares,
)
from isotrain.algorithms.segments import assert_aligned, sums
from isotrain.data.loader import BatchLoader, MicroBatch, StepData
from isotrain.data.reference_logprobs import COLUMNS, MISMATCHED, ReferenceLogProbs, make_table, table_path
from isotrain.engine.engine import InferenceModel, Objective, TrainingEngine, UpdateResult, Work
from isotrain.engine.scores import StepScores, at_ends, at_last_tokens
from isotrain.models.lora import adapters_off
from isotrain.models.packed import ScalarHead, TokenHead
from isotrain.observe.console import Console

Reference = Callable[[Sequence[MicroBatch]], list[torch.Tensor]]
"""From micro-batches to the summed log-probs of each of their samples, `logp_S`."""


def response_logps(model: InferenceModel, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    """The summed log-probs of each sample's response; ranks must bring equally many micro-batches."""
    logps = model.infer([batch.packed for batch in batches], lambda head: head.logps())
    return [sums(logp_N, batch.lengths) for batch, logp_N in zip(batches, logps, strict=True)]


def without_adapters(engine: TrainingEngine) -> Reference:
    """The policy's own base model: adapters are all that learns."""

    def reference(batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        with adapters_off(engine.model):
            return response_logps(engine, batches)

    return reference


def beside(model: InferenceModel) -> Reference:
    """A second model that stays as it is."""
    return lambda batches: response_logps(model, batches)


def precomputed(device: torch.device) -> Reference:
    """The loader's cached log-probs."""

    def reference(batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        logps = [batch.ref_logp_S for batch in batches]
        return [logp_S.to(device) for logp_S in logps if logp_S is not None]

    return reference


SECONDS_BETWEEN_LINES = 10.0


def precompute_reference(
    engine: TrainingEngine,
    loader: BatchLoader,
    model: Mapping[str, str],
    steps: int,
    root: Path,
    console: Console,
) -> None:
    """Give the loader a table of all items of its first `steps`; `model` identifies the engine's model.

    Only what no earlier run has left in the cache is computed, with the packing of the steps that will learn
    from it. The engine must have its first weights.
    """
    world = engine.world
    path = table_path(root, _identity(engine, loader, model))
    if world.local_rank == 0:
        make_table(path, len(loader.store))
    world.barrier()
    table = ReferenceLogProbs(path, len(loader.store))
    # A machine may have what another lacks: what one lacks is computed by all.
    known = np.array(world.sum(table.known().astype(float).tolist())) == world.size
    sampler = replace(loader.sampler, taken=0)
    draws = min(steps, -(-sampler.rows // sampler.batch_size))
    batches = [sampler.next_batch() for _ in range(draws)]
    missing = int((~known[np.unique(np.concatenate(batches))]).sum())
    if missing:
        console.message(f"computing reference log-probs of {missing:,} items, to be cached in {path}")
    reported, done = time.monotonic(), 0
    for drawn in batches:
        # A batch that crosses into the next epoch may have an item twice.
        numbers = list(dict.fromkeys(int(number) for number in drawn if not known[number]))
        known[numbers] = True
        if not numbers:
            continue
        logps_IC = _compute(engine, loader, numbers)
        if world.local_rank == 0:
            table.put(numbers, logps_IC)
        done += len(numbers)
        if time.monotonic() - reported > SECONDS_BETWEEN_LINES:
            reported = time.monotonic()
            console.message(f"reference log-probs: {done:,} of {missing:,} items")
    if world.local_rank == 0:
        table.flush()
    world.barrier()
    loader.reference = table


def _identity(engine: TrainingEngine, loader: BatchLoader, model: Mapping[str, str]) -> dict[str, Any]:
    """Everything the numbers depend on; devices and kernels round differently."""
    return {
        "model": dict(model),
        "data": loader.store.digest,
        "mismatched": loader.longest,
        "device": engine.world.device.type,
        "attention": engine.model.attention,
        **({"fused": list(fused)} if (fused := engine.model.fused.operators) else {}),
        **({"ring": split.place.ring} if (split := engine.model.context) and split.place.ring > 1 else {}),
    }


def _compute(engine: TrainingEngine, loader: BatchLoader, numbers: Sequence[int]) -> npt.NDArray[np.float32]:
    data = loader.step_of(numbers)
    places = {number: place for place, number in enumerate(numbers)}
    own_IC = np.zeros((len(numbers), COLUMNS), np.float64)

    def fill(batches: Sequence[MicroBatch], columns: slice) -> None:
        for batch, logp_S in zip(batches, response_logps(engine, batches), strict=True):
            rows = np.array([places[number] for number in batch.numbers], np.int64)  # may be empty
            own_IC[rows, columns] = logp_S.cpu().numpy().reshape(own_IC[rows, columns].shape)

    fill(data.batches, loader.reference_columns)
    if data.mismatched:
        fill(data.mismatched, MISMATCHED)
    total = engine.world.total(own_IC.reshape(-1).tolist())
    return np.array(total, np.float32).reshape(own_IC.shape)


@dataclass(frozen=True)
class PreferenceTask:
    engine: TrainingEngine
    work: Callable[[StepData], Work]
    metrics: Callable[[dict[str, float]], dict[str, float]]
    """From summed shares to metrics."""
    size: Callable[[StepData], int] = lambda data: data.items
    """The divisor of the shares of a step."""

    def update(self, data: StepData, lr: float) -> UpdateResult:
        result = self.engine.update(partial(self.work, data), lr)
        return replace(result, metrics=self.metrics(result.metrics))

    def evaluate(self, steps: Iterable[StepData]) -> dict[str, float]:
        """Means over all steps, each of which counts by its size."""
        totals: dict[str, float] = {}
        weight = 0
        for data in steps:
            shares: Counter[str] = Counter()
            for packed, objective in self.work(data):
                ((loss, metrics),) = self.engine.infer([packed], objective)
                shares.update(
                    {"loss": loss.item(), **{name: value.item() for name, value in metrics.items()}}
                )
            for name, total in zip(shares, self.engine.world.total(list(shares.values())), strict=True):
                totals[name] = totals.get(name, 0.0) + total * self.size(data)
            weight += self.size(data)
        return self.metrics({name: total / weight for name, total in totals.items()})


@dataclass(frozen=True)
class KtoWork:
    engine: TrainingEngine
    reference: Reference
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, data: StepData) -> Work:
        kl = self._reference_point(data)
        references = self.reference(data.batches)
        return [
            (batch.packed, self._objective(batch, ref_logp_S, kl, data.items))
            for batch, ref_logp_S in zip(data.batches, references, strict=True)
        ]

    def _reference_point(self, data: StepData) -> float:
        policy = response_logps(self.engine, data.mismatched)
        reference = self.reference(data.mismatched)
        log_ratio = 0.0
        for logp_S, ref_logp_S in zip(policy, reference, strict=True):
            assert_aligned(logp_S, ref_logp_S)
            log_ratio += (logp_S - ref_logp_S).sum().item()
        return reference_point(self.engine.world.total([log_ratio])[0], data.items)

    def _objective(self, batch: MicroBatch, ref_logp_S: torch.Tensor, kl: float, responses: int) -> Objective:
        def objective(head: TokenHead) -> Loss:
            logp_S = sums(head.logps(), batch.lengths)
            desirable_S = batch.values_V.to(logp_S.device) > 0.5
            loss, metrics = kto(logp_S, ref_logp_S, desirable_S, kl=kl, responses=responses, **self.options)
            share = len(batch.numbers) / responses  # of the step, so that the sum is `kl` itself
            return loss, {**metrics, "kl": torch.tensor(kl * share, device=logp_S.device)}

        return objective


@dataclass(frozen=True)
class DpoWork:
    loss: Callable[..., PairLosses]
    options: dict[str, Any]
    reference: Reference | None
    """None for losses that have none."""

    def __call__(self, data: StepData) -> Work:
        references: list[torch.Tensor | None] = [None] * len(data.batches)
        if self.reference is not None:
            references = list(self.reference(data.batches))
        return [
            (batch.packed, self._objective(batch, ref_logp_S, data.items))
            for batch, ref_logp_S in zip(data.batches, references, strict=True)
        ]

    def _objective(self, batch: MicroBatch, ref_logp_S: torch.Tensor | None, pairs: int) -> Objective:
        def objective(head: TokenHead) -> Loss:
            logp_S = sums(head.logps(), batch.lengths)
            tokens_S = torch.tensor(batch.lengths, device=logp_S.device)
            chosen, rejected = (
                Side(logp_S[side::2], None if ref_logp_S is None else ref_logp_S[side::2], tokens_S[side::2])
                for side in (0, 1)
            )
            return shares(self.loss(chosen, rejected, **self.options), pairs)

        return objective


@dataclass(frozen=True)
class RmWork:
    margins: bool
    """Whether the items' labels are margins to be used."""
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, data: StepData) -> Work:
        return [(at_last_tokens(batch.packed), self._objective(batch, data.items)) for batch in data.batches]

    def _objective(self, batch: MicroBatch, pairs: int) -> Objective:
        def objective(head: ScalarHead) -> Loss:
            # The stand-in of an empty micro-batch has a score as well, which belongs to no pair.
            scores_S = head.values()[: 2 * len(batch.numbers)]
            margin_P = batch.values_V.to(scores_S.device) if self.margins else None
            return shares(rm(scores_S[0::2], scores_S[1::2], margin_P=margin_P, **self.options), pairs)

        return objective


@dataclass(frozen=True)
class PrmWork:
    step_scores: StepScores

    def __call__(self, data: StepData) -> Work:
        return [(at_ends(batch.packed), self._objective(batch, data.labels)) for batch in data.batches]

    def _objective(self, batch: MicroBatch, steps: int) -> Objective:
        def objective(head: Any) -> Loss:
            bad_N, good_N = self.step_scores(head)
            labels_N = batch.values_V.to(bad_N.device)
            loss, metrics = prm(bad_N, good_N, labels_N, steps)
            wrong_N, truly_wrong_N = bad_N > good_N, labels_N <= 0.5
            return loss, {
                **metrics,
                "found": (wrong_N & truly_wrong_N).float().sum() / steps,
                "called_wrong": wrong_N.float().sum() / steps,
                "wrong": truly_wrong_N.float().sum() / steps,
                **calibration_sums(torch.sigmoid(good_N - bad_N).detach(), ~truly_wrong_N, steps),
            }

        return objective
