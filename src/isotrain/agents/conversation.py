"""The tokens of one episode as they came: sampled ones, given ones, and where a new sequence began.

N: response tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from isotrain.data.trajectory import Episode, Trajectory, Turn


@dataclass
class _Sequence:
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)


class Conversation:
    """Tokens are only ever added: none that was sampled is turned into text and back."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._sequences = [_Sequence(list(prompt))]

    @property
    def tokens(self) -> list[int]:
        """What the policy continues: all tokens of the current sequence."""
        current = self._sequences[-1]
        return current.prompt + current.tokens

    def wrote(self, turn: Trajectory) -> None:
        """A turn of the policy, as its engine gave it."""
        current, count = self._sequences[-1], len(turn.response_N)
        current.turns.append(Turn(len(current.tokens), len(current.tokens) + count, 0.0, 0, 0, 0.0))
        current.tokens += turn.response_N.tolist()
        current.mask += [True] * count
        current.logps += turn.logp_N.tolist()
        current.versions += turn.version_N.tolist()

    def came_of_it(
        self, *, reward: float = 0.0, calls: int = 0, failures: int = 0, seconds: float = 0.0
    ) -> None:
        """What the environment made of the last turn; added to what is known of it."""
        turns = next(each.turns for each in reversed(self._sequences) if each.turns)
        last = turns[-1]
        turns[-1] = last._replace(
            reward=last.reward + reward,
            calls=last.calls + calls,
            failures=last.failures + failures,
            seconds=last.seconds + seconds,
        )

    def given(self, tokens: Sequence[int]) -> None:
        """What the policy reads next and did not write."""
        current = self._sequences[-1]
        version = current.versions[-1] if current.versions else 0
        current.tokens += tokens
        current.mask += [False] * len(tokens)
        current.logps += [0.0] * len(tokens)
        current.versions += [version] * len(tokens)

    def anew(self, prompt: Sequence[int]) -> None:
        """What the policy reads next does not begin with what it read and wrote before."""
        self._sequences.append(_Sequence(list(prompt)))

    def trajectories(
        self,
        *,
        row: int,
        prompt_index: int,
        sample: int,
        seed: int,
        finished: bool,
        reward: float | None = None,
        failure: str | None = None,
        detail: str = "",
    ) -> list[Trajectory]:
        """One for each sequence in which the policy wrote; the first of all, if it wrote in none.

        What it was given last and did not answer is left out. A failed episode has no rewards of turns: its
        score is the failed one.
        """
        kept = [each for each in self._sequences if each.turns] or self._sequences[:1]
        earlier, found = 0.0, []
        for part, each in enumerate(kept):
            end = each.turns[-1].end if each.turns else 0
            turns = tuple(turn._replace(reward=0.0) if failure else turn for turn in each.turns)
            episode = Episode(part, len(kept), turns, earlier, reward, failure, detail)
            earlier += sum(turn.reward for turn in turns)
            found.append(
                Trajectory(
                    row=row,
                    prompt_index=prompt_index,
                    sample=sample,
                    seed=seed,
                    prompt_length=len(each.prompt),
                    tokens_T=np.array(each.prompt + each.tokens[:end], np.int32),
                    mask_N=np.array(each.mask[:end], np.bool_),
                    logp_N=np.array(each.logps[:end], np.float32),
                    version_N=np.array(each.versions[:end], np.int32),
                    finished=finished,
                    episode=episode,
                )
            )
        return found
