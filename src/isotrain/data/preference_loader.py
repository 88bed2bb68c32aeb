"""From a preference store to the micro-batches of each step, for one rank.

S: samples of a micro-batch, V: its labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from isotrain.data.mismatched import Numbers, donors
from isotrain.data.packing import PackedBatch, pack, plan_micro_batches
from isotrain.data.preference_items import Item
from isotrain.data.preference_store import PreferenceStore
from isotrain.data.reference_logprobs import ANSWER, MISMATCHED, PAIR, ReferenceLogProbs
from isotrain.data.sample import Sample
from isotrain.data.sampler import Sampler
from isotrain.data.shared_prompts import pack_shared


@dataclass(frozen=True)
class PreferenceBatch:
    packed: PackedBatch
    lengths: tuple[int, ...]
    """Marked tokens of each sample, on the host."""
    values_V: torch.Tensor
    """The labels of all items, one after the other."""
    numbers: tuple[int, ...]
    """Of the items, in their store."""
    ref_logp_S: torch.Tensor | None = None
    """Log-probs under the reference, where the feed has them."""


@dataclass(frozen=True)
class PreferenceStep:
    """One rank's part of a step, and the size of the whole."""

    batches: list[PreferenceBatch]
    mismatched: list[PreferenceBatch]
    """Each prompt with the response to another one, where the algorithm asks for that."""
    items: int
    labels: int
    tokens: int
    """Tokens of the whole step, over all ranks."""
    lengths: list[int]
    """Lengths of the whole step's samples."""


@dataclass
class PreferenceLoader:
    """Every rank draws the same items and keeps its own share of the plan: nothing is exchanged."""

    store: PreferenceStore
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
        self._donors: Numbers | None = donors(self.store.prompt_ids()) if self.longest else None

    @property
    def own_columns(self) -> slice:
        """Where a reference table has the log-probs of an item's own samples."""
        return ANSWER if self.longest else PAIR

    def next_step(self) -> PreferenceStep:
        return self.step_of([int(row) for row in self.sampler.next_batch()])

    def step_of(self, numbers: Sequence[int]) -> PreferenceStep:
        """These items as one step."""
        sizes = [self.store.sizes(number) for number in numbers]
        lengths = [length for item in sizes for length, _ in item]
        return PreferenceStep(
            batches=[self._pack(own) for own in self._own(numbers, [self._stored(item) for item in sizes])],
            mismatched=self._mismatched(numbers) if self.longest else [],
            items=len(numbers),
            labels=sum(self.store.labels(number) for number in numbers),
            tokens=sum(lengths),
            lengths=lengths,
        )

    def one_pass(self) -> Iterator[PreferenceStep]:
        """The sampler's items once, from the beginning; it is left at the end of the pass."""
        self.sampler.taken = 0
        while self.sampler.taken < self.sampler.rows:
            yield self.next_step()

    def _own(self, numbers: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
        plan = plan_micro_batches(tokens, self.budget, self.ranks)[self.rank]
        return [[numbers[i] for i in chosen] for chosen in plan]

    def _stored(self, item: Sequence[tuple[int, int]]) -> int:
        total = sum(length for length, _ in item)
        same_prompt = len({prompt for _, prompt in item}) == 1
        return total - (len(item) - 1) * item[0][1] * (self.share_prompts and same_prompt)

    def _pack(self, numbers: Sequence[int]) -> PreferenceBatch:
        items = [self.store[number] for number in numbers]
        return self._packed(items, numbers, self.own_columns)

    def _packed(self, items: Sequence[Item], numbers: Sequence[int], columns: slice) -> PreferenceBatch:
        samples = [sample for item in items for sample in item.samples]
        prompts = [prompt for item in items for prompt in item.prompts]
        values_V = np.concatenate([np.zeros(0, np.float32), *(item.values_V for item in items)])
        return PreferenceBatch(
            packed=pack_shared(samples, prompts) if self.share_prompts else pack(samples),
            lengths=tuple(int(sample.mask_T.sum()) for sample in samples),
            values_V=torch.from_numpy(values_V),
            numbers=tuple(numbers),
            ref_logp_S=self._ref_logps(numbers, columns),
        )

    def _ref_logps(self, numbers: Sequence[int], columns: slice) -> torch.Tensor | None:
        if self.reference is None:
            return None
        return torch.from_numpy(self.reference[numbers][:, columns].reshape(-1))

    def _mismatched(self, numbers: Sequence[int]) -> list[PreferenceBatch]:
        """Each prompt with the response to another one; which one depends on the store alone."""
        assert self.longest is not None
        tokens = []
        for number in numbers:
            ((_, prompt),) = self.store.sizes(number)
            ((length, start),) = self.store.sizes(self._donor(number))
            tokens.append(min(self.longest, prompt + length - start))
        return [
            self._packed([self._swapped(number) for number in own], own, MISMATCHED)
            for own in self._own(numbers, tokens)
        ]

    def _donor(self, number: int) -> int:
        assert self._donors is not None
        return int(self._donors[number])

    def _swapped(self, number: int) -> Item:
        item, donor = self.store[number], self.store[self._donor(number)]
        (sample,), (prompt,) = item.samples, item.prompts
        (other,), (start,) = donor.samples, donor.prompts
        tokens_T = np.concatenate([sample.tokens_T[:prompt], other.tokens_T[start:]])[: self.longest]
        mask_T = np.concatenate([sample.mask_T[:prompt], other.mask_T[start:]])[: self.longest]
        return Item((Sample(tokens_T, mask_T),), item.values_V)
