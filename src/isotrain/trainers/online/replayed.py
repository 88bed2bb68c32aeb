"""Batches of recorded trajectories instead of new responses.

P: tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.cluster.objects import put
from isotrain.data.prompts import Prompt
from isotrain.data.record import Record, read_others, read_step, step_file
from isotrain.data.sampler import Sampler
from isotrain.data.store import SampleStore
from isotrain.errors import DataError
from isotrain.trainers.online.batches import Batch, Make
from isotrain.trainers.online.collector import Seconds
from isotrain.trainers.online.failures import recorded_failures
from isotrain.trainers.online.messages import Group, Score, describe


class Replayed:
    """A maker of batches: forced are trajectories, with the log-probs they were sampled with, and scores.

    Everything after that is computed anew. The files may come from another machine, so what the ranks would
    stumble over is looked at here: a draw that this run would not make, incomplete groups, strange tokens.
    """

    def __init__(
        self,
        directory: Path,
        prompts: SampleStore[Prompt],
        sampler: Sampler,
        *,
        done: int,
        attempts: int,
        n: int,
        max_tokens: int,
        vocabulary: int,
    ) -> None:
        """`sampler` and `done` are where a run goes on; `attempts` is how often draws may be replaced."""
        self.directory, self.prompts, self.step = directory, prompts, done
        self.sampler, self.taken = sampler, sampler.taken
        self.most = sampler.batch_size * (attempts + 1)
        self.n, self.max_tokens, self.vocabulary = n, max_tokens, vocabulary

    def begin(self) -> Make:
        self.step += 1
        self.sampler.taken = self.taken
        return lambda next_may_begin: self._make()

    def again(self, groups: list[Group], gone: Collection[Any]) -> list[Group]:
        """All groups of the batch, from the files that they came from."""
        return self._groups()[0]

    def _make(self) -> Batch:
        groups, greedy = self._groups()
        wanted = len(replace(self.sampler).next_batch())
        if len(groups) != wanted:
            raise self._wrong(f"has {len(groups)} prompts instead of {wanted}")
        self.taken = groups[-1].responses.prompt_index + 1
        return Batch(
            groups,
            greedy or None,
            taken=self.taken,
            seconds=Seconds(0.0, 0.0),
            # A draw that was replaced by another has left a gap.
            resampled=self.taken - self.sampler.taken - wanted,
            others=recorded_failures(read_others(self.directory, self.step)),
        )

    def _groups(self) -> tuple[list[Group], dict[int, float]]:
        """The step's groups in the order of their draws, and the greedy scores that were recorded."""
        groups: list[Group] = []
        greedy: dict[int, float] = {}
        for prompt_index, records in _by_draw(read_step(self.directory, self.step)):
            self._check(prompt_index, records)
            group = tuple(record.trajectory for record in records)
            scores = tuple(Score(m.score, m.parts, m.failure, m.detail) for _, m, _ in records)
            groups.append(Group(describe(group), put(group), scores, records[0].marks.source))
            if (score := records[0].marks.greedy) is not None:
                greedy[prompt_index] = score
        return groups, greedy

    def _check(self, prompt_index: int, records: Sequence[Record]) -> None:
        group = [record.trajectory for record in records]
        if [t.sample for t in group] != list(range(self.n)):
            raise self._wrong(f"does not have {self.n} responses to draw {prompt_index}")
        drawn = self._row(prompt_index)
        prompt_P = self.prompts[drawn].tokens_P
        for t in group:
            if t.row != drawn or not np.array_equal(t.tokens_T[: t.prompt_length], prompt_P):
                raise self._wrong(
                    f"has a prompt for draw {prompt_index} that differs from the data of this recipe"
                )
            if len(t.mask_N) > self.max_tokens:
                raise self._wrong(f"has a response of {len(t.mask_N)} tokens to draw {prompt_index}")
            if ((t.tokens_T < 0) | (t.tokens_T >= self.vocabulary)).any():
                raise self._wrong(f"has tokens outside the vocabulary in a response to draw {prompt_index}")

    def _row(self, prompt_index: int) -> int:
        if not 0 <= prompt_index - self.sampler.taken < self.most:
            raise self._wrong(f"has responses to draw {prompt_index}, which is not part of this step")
        return int(replace(self.sampler, taken=prompt_index, batch_size=1, limit=None).next_batch()[0])

    def _wrong(self, what: str) -> DataError:
        """The files of a step are one thing: whatever is wrong is told of the first."""
        file = step_file(self.directory, self.step, 0)
        return DataError(f"{file}: step {self.step} {what}; record it again")


def _by_draw(records: Sequence[Record]) -> Iterator[tuple[int, list[Record]]]:
    for prompt_index, group in groupby(records, key=lambda record: record.trajectory.prompt_index):
        yield prompt_index, list(group)
