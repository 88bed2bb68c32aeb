"""From a token store to the micro-batches of each step, for one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isotrain.data.packing import PackedBatch, pack, plan_micro_batches
from isotrain.data.sampler import Sampler
from isotrain.data.store import TokenStore


@dataclass(frozen=True)
class StepData:
    """One rank's part of a step."""

    batches: list[PackedBatch]
    tokens: int
    """Tokens of the whole step, over all ranks."""
    lengths: list[int]
    """Lengths of the whole step's samples."""


@dataclass
class Feed:
    """Every rank draws the same rows and keeps its own share of the plan: nothing is exchanged."""

    store: TokenStore
    sampler: Sampler
    budget: int
    rank: int
    ranks: int

    def next_step(self) -> StepData:
        rows = self.sampler.next_batch()
        lengths = [int(length) for length in self.store.lengths[rows]]
        own = plan_micro_batches(lengths, self.budget, self.ranks)[self.rank]
        batches = [pack([self.store[int(rows[i])] for i in chosen]) for chosen in own]
        return StepData(batches, sum(lengths), lengths)

    def one_pass(self) -> Iterator[StepData]:
        """The sampler's rows once, from the beginning; it is left at the end of the pass."""
        self.sampler.taken = 0
        while self.sampler.taken < self.sampler.rows:
            yield self.next_step()
