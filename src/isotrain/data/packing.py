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
import numpy.typing as npt
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
    """Tokens of each segment, on the host: kernels that need bounds get them without a device sync."""
    predict_N: torch.Tensor
    targets_N: torch.Tensor
    last_S: torch.Tensor
    """Position of each sample's last token."""
    continues: tuple[int, ...] = ()
    """For each segment the number of the one that it continues, or -1; empty where each is a sample."""
    predict_on_host_N: npt.NDArray[np.int64] | None = None
    """`predict_N` on the host, also of a batch on a device: what is decided by it needs no device sync."""

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
            last_S=self.last_S.to(device, non_blocking=True),
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
        last_S=torch.tensor(lengths).cumsum(0) - 1,
        predict_on_host_N=target_at_N - 1,
    )


def computing_cost(tokens: int, seen: int) -> float:
    """Of tokens that each see about `seen` tokens, in units of a token that sees few."""
    return tokens * (1 + seen / ATTENTION_CROSSOVER)


def plan_micro_batches(
    lengths: Sequence[int], budget: int, ranks: int, costs: Sequence[float] | None = None
) -> list[list[list[int]]]:
    """Which sample goes into which micro-batch of which rank: `plan[rank][micro_batch]` lists samples.

    Every rank gets equally many micro-batches, and the k-th ones of all ranks cost about the same: the ranks
    meet in collectives at every layer, so the slowest sets the pace. The plan is a function of its arguments
    alone; all ranks compute it for themselves. `costs` are for what is not a single sample.
    """
    longest = max(lengths, default=0)
    assert longest <= budget, f"a sample of {longest} tokens exceeds the budget of {budget}"

    costs = costs or [computing_cost(length, length) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    def fill(per_rank: int) -> list[list[int]] | None:
        return _fill(order, lengths, costs, budget, per_rank * ranks)

    # One more micro-batch at a time would take thousands of attempts where samples leave much of each unused:
    # double the step until all fit, then halve it, to the fewest or, beyond hundreds, within 1 % of them.
    fewest = max(1, -(-_fewest_bins(lengths, budget) // ranks))
    enough, step = fewest, max(1, fewest // 128)
    while (bins := fill(enough)) is None:
        fewest, enough, step = enough + 1, enough + step, 2 * step
    while enough - fewest > enough // 128:
        middle = (fewest + enough) // 2
        if (fewer := fill(middle)) is None:
            fewest = middle + 1
        else:
            enough, bins = middle, fewer
    return [bins[rank::ranks] for rank in range(ranks)]


def _fewest_bins(lengths: Sequence[int], budget: int) -> int:
    """How many bins any packing needs at least: for all tokens, and for the samples of each size.

    At most k samples longer than budget / (k + 1) go into one bin.
    """
    sizes = np.sort(np.asarray(lengths, np.int64))
    fewest = -(-int(sizes.sum()) // budget)
    for k in range(1, min(len(sizes), 16) + 1):
        longer = len(sizes) - int(np.searchsorted(sizes, budget // (k + 1), side="right"))
        fewest = max(fewest, -(-longer // k))
    return fewest


def _fill(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], budget: int, count: int
) -> list[list[int]] | None:
    """In `order`, longest first, each into the cheapest bin that has room; None where one does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    open_bins = [(0.0, 0, index) for index in range(count)]
    # Bins without room for the sample at hand, emptiest first: later samples are shorter and may fit again.
    full_bins: list[tuple[int, float, int]] = []
    for sample in order:
        room = budget - lengths[sample]
        while full_bins and full_bins[0][0] <= room:
            tokens, cost, index = heapq.heappop(full_bins)
            heapq.heappush(open_bins, (cost, tokens, index))
        if not open_bins:
            return None
        cost, tokens, index = heapq.heappop(open_bins)
        bins[index].append(sample)
        cost, tokens = cost + costs[sample], tokens + lengths[sample]
        if tokens <= room:
            heapq.heappush(open_bins, (cost, tokens, index))
        else:
            heapq.heappush(full_bins, (tokens, cost, index))
    by_cost = sorted(bins, key=lambda samples: -sum(costs[i] for i in samples))
    return [sorted(samples) for samples in by_cost]
