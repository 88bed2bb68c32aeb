"""The order of samples, and the micro-batches of each step, for one rank.

B: samples of a batch, S: samples of a micro-batch, V: its labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from isotrain.data.items import PROMPT_IDS, Item, Sample, Size, labels, picture_patches, sizes
from isotrain.data.packing import (
    PATCH_COST,
    PackedBatch,
    computing_cost,
    pack,
    pack_shared,
    plan_micro_batches,
)
from isotrain.data.reference_logprobs import MISMATCHED, PAIR, RESPONSE, ReferenceLogProbs
from isotrain.data.store import SampleStore
from isotrain.errors import DataError

_ROUNDS = 6


@dataclass
class Sampler:
    """Batches of row indices over endless epochs; its whole state is how many samples were taken.

    The order is a function of three integers, at any position: no list is kept.

    Epochs flow into each other, so that no row is left out when the row count is not a multiple of the
    batch size. `limit` (rows x epochs, or None) makes the last batch short instead of crossing into one
    epoch too many.
    """

    rows: int
    batch_size: int
    seed: int
    shuffle: bool = True
    limit: int | None = None
    taken: int = 0

    def next_batch(self) -> npt.NDArray[np.int64]:
        end = self.taken + self.batch_size
        if self.limit is not None:
            end = min(end, self.limit)
        place_B = np.arange(self.taken, end, dtype=np.int64)
        self.taken = end
        if not self.shuffle:
            return place_B % self.rows
        epoch_B, offset_B = np.divmod(place_B, self.rows)
        rows_B = np.empty_like(place_B)
        for epoch in np.unique(epoch_B):
            of_epoch = epoch_B == epoch
            rows_B[of_epoch] = permute(offset_B[of_epoch], self.rows, self.seed, int(epoch))
        return rows_B


def permute(offset_B: npt.NDArray[np.int64], rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Where a random permutation of `range(rows)` sends the given offsets.

    A Feistel network over the next even power of two, walked until it lands inside `rows`: O(1) memory for
    any number of rows, random access for exact resume, and the same order whatever library or device.
    """
    half_bits = max(1, ((rows - 1).bit_length() + 1) // 2)
    half_mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    keys = _mix(np.arange(_ROUNDS, dtype=np.uint64) + _mix(_mix(np.uint64(seed)) + np.uint64(epoch)))
    value_B = offset_B.astype(np.uint64)
    outside_B = np.ones(len(value_B), dtype=bool)
    while outside_B.any():
        left, right = value_B[outside_B] >> shift, value_B[outside_B] & half_mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & half_mask)
        value_B[outside_B] = (left << shift) | right
        outside_B = value_B >= rows
    return value_B.astype(np.int64)


def _mix(value: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    """The splitmix64 finaliser: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(value, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        final: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
        return final


@dataclass(frozen=True)
class MicroBatch:
    packed: PackedBatch
    lengths: tuple[int, ...]
    """Marked tokens of each sample after its first, which nothing predicts, on the host."""
    values_V: torch.Tensor
    """The labels of all items, one after the other."""
    numbers: tuple[int, ...]
    """Numbers of the items in their store."""
    ref_logp_S: torch.Tensor | None = None
    """Log-probs under the reference, where the loader has them."""

    def __post_init__(self) -> None:
        assert sum(self.lengths) == self.packed.loss_tokens, "each marked token has a log-prob"
        if self.ref_logp_S is not None:
            assert len(self.ref_logp_S) == len(self.lengths), "each sample has a reference"


@dataclass(frozen=True)
class StepData:
    """One rank's part of a step, and the size of the whole."""

    batches: list[MicroBatch]
    mismatched: list[MicroBatch]
    """Each prompt with the response to another prompt, if the algorithm needs that."""
    items: int
    labels: int
    tokens: int
    """Tokens of the whole step, over all ranks."""
    lengths: list[int]
    """Lengths of the whole step's samples."""


@dataclass
class BatchLoader:
    """Every rank draws the same items and keeps its own share of the plan: nothing is exchanged."""

    store: SampleStore[Item]
    sampler: Sampler
    budget: int
    rank: int
    ranks: int
    share_prompts: bool = False
    """Whether the samples of an item store their common prompt once."""
    longest: int | None = None
    """Where set, there are mismatched samples of at most this length as well."""
    reference: ReferenceLogProbs | None = None

    def __post_init__(self) -> None:
        self._donors: Numbers | None = None
        if self.longest:
            first = self.store.offsets[PROMPT_IDS][:-1]
            self._donors = donors(self.store.columns[PROMPT_IDS][first])

    @property
    def reference_columns(self) -> slice:
        """Where a reference table has the log-probs of an item's own samples."""
        return RESPONSE if self.longest else PAIR

    def next_step(self) -> StepData:
        return self.step_of([int(row) for row in self.sampler.next_batch()])

    def step_of(self, numbers: Sequence[int]) -> StepData:
        """These items as one step."""
        of_items = [sizes(self.store, number) for number in numbers]
        lengths = [size.tokens for item in of_items for size in item]
        micro_batches = self._rank_share(numbers, [self._stored(item) for item in of_items])
        return StepData(
            batches=[
                self._packed([self.store[n] for n in chosen], chosen, self.reference_columns)
                for chosen in micro_batches
            ],
            mismatched=self._mismatched(numbers) if self.longest else [],
            items=len(numbers),
            labels=sum(labels(self.store, number) for number in numbers),
            tokens=sum(lengths),
            lengths=lengths,
        )

    def one_pass(self) -> Iterator[StepData]:
        """The sampler's items once, from the beginning; it is left at the end of the pass."""
        self.sampler.taken = 0
        while self.sampler.taken < self.sampler.rows:
            yield self.next_step()

    def _rank_share(self, numbers: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
        patches = [picture_patches(self.store, number) for number in numbers]
        costs = [computing_cost(n, n) + PATCH_COST * p for n, p in zip(tokens, patches, strict=True)]
        plan = plan_micro_batches(tokens, self.budget, self.ranks, costs)[self.rank]
        return [[numbers[i] for i in chosen] for chosen in plan]

    def _stored(self, item: Sequence[Size]) -> int:
        same_prompt = self.share_prompts and len({size.prompt_id for size in item}) == 1
        return sum(size.tokens for size in item) - (len(item) - 1) * item[0].prompt * same_prompt

    def _packed(self, items: Sequence[Item], numbers: Sequence[int], columns: slice) -> MicroBatch:
        samples = [sample for item in items for sample in item.samples]
        prompts = [prompt for item in items for prompt in item.prompts]
        values_V = np.concatenate([np.zeros(0, np.float32), *(item.values_V for item in items)])
        return MicroBatch(
            packed=pack_shared(samples, prompts) if self.share_prompts else pack(samples),
            lengths=tuple(int(sample.mask_T[1:].sum()) for sample in samples),
            values_V=torch.from_numpy(values_V),
            numbers=tuple(numbers),
            ref_logp_S=self._ref_logps(numbers, columns),
        )

    def _ref_logps(self, numbers: Sequence[int], columns: slice) -> torch.Tensor | None:
        if self.reference is None:
            return None
        return torch.from_numpy(self.reference[numbers][:, columns].reshape(-1))

    def _mismatched(self, numbers: Sequence[int]) -> list[MicroBatch]:
        """Each prompt with the response to another prompt, chosen from the store alone."""
        assert self.longest is not None and self._donors is not None
        tokens = []
        for number in numbers:
            ((size,), (other,)) = (sizes(self.store, n) for n in (number, int(self._donors[number])))
            tokens.append(min(self.longest, size.prompt + other.tokens - other.prompt))
        return [
            self._packed(
                [self._swapped(number, int(self._donors[number])) for number in chosen], chosen, MISMATCHED
            )
            for chosen in self._rank_share(numbers, tokens)
        ]

    def _swapped(self, number: int, donor: int) -> Item:
        item, other_item = self.store[number], self.store[donor]
        (sample,), (prompt,) = item.samples, item.prompts
        (other,), (start,) = other_item.samples, other_item.prompts
        tokens_T = np.concatenate([sample.tokens_T[:prompt], other.tokens_T[start:]])[: self.longest]
        mask_T = np.concatenate([sample.mask_T[:prompt], other.mask_T[start:]])[: self.longest]
        return Item((Sample(tokens_T, mask_T),), item.values_V)


Numbers = npt.NDArray[np.int64]


def donors(prompt_ids: Numbers) -> Numbers:
    """Which item gives its response to each prompt; it depends on the order of the items alone.

    Items of one prompt count as one group, wherever they are. The first of a group takes the response that
    follows the group, the second the next, and so on past all other groups: responses are used evenly.
    """
    count = len(prompt_ids)
    _, first, group = np.unique(prompt_ids, return_index=True, return_inverse=True)
    if len(first) < 2:
        raise DataError(
            f"all {count} responses belong to one prompt, but KTO's reference point needs at least two "
            "prompts; add rows of a second prompt"
        )
    order = np.argsort(first[group], kind="stable")  # groups by first appearance, each in its own order
    sizes = np.bincount(group)[group[order]]
    starts = np.searchsorted(first[group][order], first[group][order])
    rank = np.arange(count) - starts
    donor_of = np.empty(count, np.int64)
    donor_of[order] = order[(starts + sizes + rank % (count - sizes)) % count]
    return donor_of
