"""From a store to the micro-batches of each step, for one rank.

S: samples of a micro-batch, V: its labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from isotrain.data.items import PROMPT_IDS, Item, Sample, Size, labels, sizes
from isotrain.data.packing import PackedBatch, pack, pack_shared, plan_micro_batches
from isotrain.data.reference_logprobs import MISMATCHED, PAIR, RESPONSE, ReferenceLogProbs
from isotrain.data.sampler import Sampler
from isotrain.data.store import SampleStore
from isotrain.errors import DataError


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
    def own_columns(self) -> slice:
        """Where a reference table has the log-probs of an item's own samples."""
        return RESPONSE if self.longest else PAIR

    def next_step(self) -> StepData:
        return self.step_of([int(row) for row in self.sampler.next_batch()])

    def step_of(self, numbers: Sequence[int]) -> StepData:
        """These items as one step."""
        of_items = [sizes(self.store, number) for number in numbers]
        lengths = [size.tokens for item in of_items for size in item]
        micro_batches = self._own(numbers, [self._stored(item) for item in of_items])
        return StepData(
            batches=[
                self._packed([self.store[n] for n in chosen], chosen, self.own_columns)
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

    def _own(self, numbers: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
        plan = plan_micro_batches(tokens, self.budget, self.ranks)[self.rank]
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
            for chosen in self._own(numbers, tokens)
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
