"""Log-probs of responses under the policy as it was before training.

S: samples of a micro-batch, I: items of a step, C: columns of the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isotrain.algorithms.segments import sums
from isotrain.data.loader import BatchLoader, MicroBatch
from isotrain.data.reference_logprobs import COLUMNS, MISMATCHED, ReferenceLogProbs, make_table, table_path
from isotrain.engine.engine import InferenceModel, TrainingEngine
from isotrain.models.lora import adapters_off
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

    fill(data.batches, loader.own_columns)
    if data.mismatched:
        fill(data.mismatched, MISMATCHED)
    total = engine.world.total(own_IC.reshape(-1).tolist())
    return np.array(total, np.float32).reshape(own_IC.shape)
