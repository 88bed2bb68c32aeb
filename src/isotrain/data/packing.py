"""Samples to packed micro-batches: no padding, a token budget each, balanced over ranks.

T: tokens of a micro-batch, all samples one after the other.
N: loss-bearing tokens of a micro-batch.
S: samples of a micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from isotrain.data.sample import Sample

# Attention costs as much as everything else at roughly 12 x hidden size tokens; 4k hidden is the middle of
# the models people post-train. Only the balance between ranks depends on it, never a result.
ATTENTION_CROSSOVER = 49152


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch. The shift by one is done here: position `predict_N[i]` predicts `targets_N[i]`."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    lengths: tuple[int, ...]
    """Tokens of each sample, on the host: kernels that need bounds get them without a device sync."""
    predict_N: torch.Tensor
    targets_N: torch.Tensor
    segment_N: torch.Tensor
    """Which sample of the micro-batch a loss-bearing token belongs to."""

    @property
    def loss_tokens(self) -> int:
        return len(self.predict_N)

    def to(self, device: torch.device) -> PackedBatch:
        return replace(
            self,
            tokens_T=self.tokens_T.to(device, non_blocking=True),
            positions_T=self.positions_T.to(device, non_blocking=True),
            predict_N=self.predict_N.to(device, non_blocking=True),
            targets_N=self.targets_N.to(device, non_blocking=True),
            segment_N=self.segment_N.to(device, non_blocking=True),
        )


def pack(samples: Sequence[Sample]) -> PackedBatch:
    """Lay samples one after the other.

    Without samples the batch is a single token that bears no loss: every rank must take part in every
    collective, also when there is less work than ranks.
    """
    if not samples:
        samples = [Sample(np.zeros(1, np.int32), np.zeros(1, np.bool_))]
    lengths = tuple(len(sample) for sample in samples)
    tokens_T = np.concatenate([sample.tokens_T for sample in samples]).astype(np.int64)
    # A sample's first token is predicted by nothing: it must not be predicted by the sample before it.
    bears_loss_T = np.concatenate([np.concatenate([[False], sample.mask_T[1:]]) for sample in samples])
    target_at_N = np.flatnonzero(bears_loss_T)
    return PackedBatch(
        tokens_T=torch.from_numpy(tokens_T),
        positions_T=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        lengths=lengths,
        predict_N=torch.from_numpy(target_at_N - 1),
        targets_N=torch.from_numpy(tokens_T[target_at_N]),
        segment_N=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)[target_at_N]),
    )


def plan_micro_batches(lengths: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
    """Which sample goes into which micro-batch of which rank: `plan[rank][micro_batch]` lists samples.

    Every rank gets equally many micro-batches, and the k-th ones of all ranks cost about the same: the ranks
    meet in collectives at every layer, so the slowest sets the pace. The plan is a function of the lengths
    alone; all ranks compute it for themselves.
    """
    longest = max(lengths, default=0)
    assert longest <= budget, f"a sample of {longest} tokens is beyond the budget of {budget}"
    per_rank = max(1, -(-sum(lengths) // (budget * ranks)))
    while (bins := _fill(lengths, budget, per_rank * ranks)) is None:
        per_rank += 1
    return [bins[rank::ranks] for rank in range(ranks)]


def _fill(lengths: Sequence[int], budget: int, count: int) -> list[list[int]] | None:
    """Longest first, each into the cheapest bin that has room; None where one does not fit."""
    costs = [length * (1 + length / ATTENTION_CROSSOVER) for length in lengths]
    bins: list[list[int]] = [[] for _ in range(count)]
    open_bins = [(0.0, 0, index) for index in range(count)]
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        too_full = []
        while open_bins:
            cost, tokens, index = heapq.heappop(open_bins)
            if tokens + lengths[sample] <= budget:
                bins[index].append(sample)
                heapq.heappush(open_bins, (cost + costs[sample], tokens + lengths[sample], index))
                break
            too_full.append((cost, tokens, index))
        else:
            return None
        for entry in too_full:
            heapq.heappush(open_bins, entry)
    by_cost = sorted(bins, key=lambda samples: -sum(costs[i] for i in samples))
    return [sorted(samples) for samples in by_cost]
