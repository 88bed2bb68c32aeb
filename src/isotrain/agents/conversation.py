"""The tokens of one episode as they came: sampled ones, given ones, and where a new sequence began.

N: response tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isotrain.data.trajectory import Episode, Trajectory, Turn


class TokenSequence:
    """Tokens are only ever added: none that was sampled is turned into text and back."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = list(prompt)
        self.turns: list[Turn] = []
        self._response: list[int] = []
        self._mask: list[bool] = []
        self._logps: list[float] = []
        self._versions: list[int] = []

    @property
    def tokens(self) -> list[int]:
        """What the policy continues."""
        return self.prompt + self._response

    def wrote(self, turn: Trajectory) -> None:
        """A turn of the policy, as its engine gave it."""
        start, count = len(self._response), len(turn.response_N)
        self.turns.append(Turn(start, start + count, 0.0, 0, 0, 0.0))
        self._response += turn.response_N.tolist()
        self._mask += [True] * count
        self._logps += turn.logp_N.tolist()
        self._versions += turn.version_N.tolist()

    def given(self, tokens: Sequence[int]) -> None:
        """What the policy reads next and did not write."""
        version = self._versions[-1] if self._versions else 0
        self._response += tokens
        self._mask += [False] * len(tokens)
        self._logps += [0.0] * len(tokens)
        self._versions += [version] * len(tokens)

    def came_of_it(
        self, turn: int = -1, *, reward: float = 0.0, calls: int = 0, failures: int = 0, seconds: float = 0.0
    ) -> None:
        """What the environment made of a turn; added to what is known of it."""
        known = self.turns[turn]
        self.turns[turn] = known._replace(
            reward=known.reward + reward,
            calls=known.calls + calls,
            failures=known.failures + failures,
            seconds=known.seconds + seconds,
        )

    def without_last_turn(self) -> None:
        """Nobody has read what the policy wrote last."""
        self._end_at(self.turns.pop().start)

    def without_unanswered(self) -> None:
        """What the policy was given last, and did not answer, is left out."""
        self._end_at(self.turns[-1].end if self.turns else 0)

    def _end_at(self, end: int) -> None:
        for values in (self._response, self._mask, self._logps, self._versions):
            del values[end:]

    def trajectory(
        self, *, row: int, prompt_index: int, sample: int, seed: int, finished: bool, episode: Episode
    ) -> Trajectory:
        return Trajectory(
            row=row,
            prompt_index=prompt_index,
            sample=sample,
            seed=seed,
            prompt_length=len(self.prompt),
            tokens_T=np.array(self.tokens, np.int32),
            mask_N=np.array(self._mask, np.bool_),
            logp_N=np.array(self._logps, np.float32),
            version_N=np.array(self._versions, np.int32),
            finished=finished,
            episode=episode,
        )


class Conversation:
    """Sequences one after the other: turns continue the last one."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.sequences = [TokenSequence(prompt)]

    @property
    def tokens(self) -> list[int]:
        """What the policy continues: all tokens of the current sequence."""
        return self.sequences[-1].tokens

    def wrote(self, turn: Trajectory) -> None:
        """A turn of the policy, as its engine gave it."""
        self.sequences[-1].wrote(turn)

    def came_of_it(
        self, *, reward: float = 0.0, calls: int = 0, failures: int = 0, seconds: float = 0.0
    ) -> None:
        """What the environment made of the last turn; added to what is known of it."""
        last = next(each for each in reversed(self.sequences) if each.turns)
        last.came_of_it(reward=reward, calls=calls, failures=failures, seconds=seconds)

    def given(self, tokens: Sequence[int]) -> None:
        """What the policy reads next and did not write."""
        self.sequences[-1].given(tokens)

    def anew(self, prompt: Sequence[int]) -> None:
        """What the policy reads next does not begin with what it read and wrote before."""
        self.sequences.append(TokenSequence(prompt))


def as_trajectories(
    sequences: Sequence[TokenSequence],
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

    A failed episode has no rewards of turns: its score is the failed one.
    """
    kept = [each for each in sequences if each.turns] or sequences[:1]
    earlier, found = 0.0, []
    for part, each in enumerate(kept):
        each.without_unanswered()
        turns = tuple(turn._replace(reward=0.0) if failure else turn for turn in each.turns)
        episode = Episode(part, len(kept), turns, earlier, reward, failure, detail)
        earlier += sum(turn.reward for turn in turns)
        found.append(
            each.trajectory(
                row=row,
                prompt_index=prompt_index,
                sample=sample,
                seed=seed,
                finished=finished,
                episode=episode,
            )
        )
    return found
