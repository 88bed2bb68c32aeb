"""The tokens of one episode as they came: sampled ones, given ones, and where a new sequence began.

N: response tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from isotrain.data.packing import FREE
from isotrain.data.trajectory import EpisodePart, Trajectory, Turn


class Tokens:
    """Token ids that never change; what continues them refers to them, so that each is held once."""

    __slots__ = ("_before", "_ids", "_length")

    def __init__(self, ids: Sequence[int] | npt.NDArray[np.int32], before: Tokens | None = None) -> None:
        self._ids, self._before = np.asarray(ids, np.int32), before
        self._length = len(self._ids) + (0 if before is None else len(before))

    def __len__(self) -> int:
        return self._length

    def array(self) -> npt.NDArray[np.int32]:
        parts = [self._ids]
        node = self._before
        while node is not None:
            parts.append(node._ids)
            node = node._before
        return np.concatenate(parts[::-1])

    def first(self, count: int) -> Tokens:
        """The first `count` of them."""
        node = self
        while node._before is not None and len(node._before) >= count:
            node = node._before
        dropped = len(node) - count
        return node if dropped <= 0 else Tokens(node._ids[: len(node._ids) - dropped], node._before)

    def begins(self, ids: npt.NDArray[np.int32]) -> bool:
        """Whether `ids` are these tokens and perhaps more."""
        return len(self) <= len(ids) and self._common(ids) == len(self)

    def changed_to(self, ids: Sequence[int]) -> Tokens:
        """Tokens with these ids, which share what both begin with."""
        ids_T = np.asarray(ids, np.int32)
        common = self._common(ids_T)
        # A copy: a part of an array would hold all of it.
        return Tokens(ids_T[common:].copy(), self.first(common)) if common else Tokens(ids_T)

    def _common(self, ids: npt.NDArray[np.int32]) -> int:
        length = min(len(self), len(ids))
        differs_T = self.array()[:length] != ids[:length]
        return int(differs_T.argmax()) if differs_T.any() else length


class TokenSequence:
    """Tokens are only ever added: none that was sampled is turned into text and back."""

    def __init__(self, prompt: Sequence[int] | Tokens) -> None:
        self.all = prompt if isinstance(prompt, Tokens) else Tokens(prompt)
        """All tokens of the sequence, which the policy continues."""
        self.prompt_length = len(self.all)
        self.turns: list[Turn] = []
        self._mask: list[bool] = []
        self._logps: list[float] = []
        self._versions: list[int] = []
        self._routes_TLK: npt.NDArray[np.int16] | None = None

    @property
    def tokens(self) -> list[int]:
        """All tokens of the sequence, which the policy continues."""
        tokens: list[int] = self.all.array().tolist()
        return tokens

    def wrote(self, turn: Trajectory) -> None:
        """A turn of the policy, as its engine gave it."""
        start, count = len(self._mask), len(turn.response_N)
        self.turns.append(Turn(start, start + count, 0.0, 0, 0, 0.0))
        self.all = Tokens(turn.response_N.copy(), self.all)  # without the prompt before it, which is ours
        self._mask += [True] * count
        self._logps += turn.logp_N.tolist()
        self._versions += turn.version_N.tolist()
        if turn.routes_TLK is not None:
            self._routes_TLK = _continued(self._routes_TLK, turn.routes_TLK)

    def given(self, tokens: Sequence[int]) -> None:
        """Add tokens that the policy reads next and did not write."""
        version = self._versions[-1] if self._versions else 0
        self.all = Tokens(tokens, self.all)
        self._mask += [False] * len(tokens)
        self._logps += [0.0] * len(tokens)
        self._versions += [version] * len(tokens)

    def add_outcome(
        self, turn: int = -1, *, reward: float = 0.0, calls: int = 0, failures: int = 0, seconds: float = 0.0
    ) -> None:
        """Add the environment's reward, tool calls and time to a turn."""
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
        """Leave out the last tokens that the policy was given and did not answer."""
        self._end_at(self.turns[-1].end if self.turns else 0)

    def _end_at(self, end: int) -> None:
        self.all = self.all.first(self.prompt_length + end)
        for values in (self._mask, self._logps, self._versions):
            del values[end:]

    def _routes(self) -> npt.NDArray[np.int16] | None:
        """Of all tokens; those after the last turn were read by nobody."""
        if self._routes_TLK is None:
            return None
        routes_TLK = np.full((len(self.all), *self._routes_TLK.shape[1:]), FREE, np.int16)
        count = min(len(routes_TLK), len(self._routes_TLK))
        routes_TLK[:count] = self._routes_TLK[:count]
        return routes_TLK

    def trajectory(
        self, *, row: int, prompt_index: int, sample: int, seed: int, finished: bool, episode: EpisodePart
    ) -> Trajectory:
        return Trajectory(
            row=row,
            prompt_index=prompt_index,
            sample=sample,
            seed=seed,
            prompt_length=self.prompt_length,
            tokens_T=self.all.array(),
            mask_N=np.array(self._mask, np.bool_),
            logp_N=np.array(self._logps, np.float32),
            version_N=np.array(self._versions, np.int32),
            finished=finished,
            episode=episode,
            routes_TLK=self._routes(),
        )


def _continued(
    before_TLK: npt.NDArray[np.int16] | None, turn_TLK: npt.NDArray[np.int16]
) -> npt.NDArray[np.int16]:
    """Routes of a turn, which has read all tokens again: those that were sampled keep their first ones."""
    if before_TLK is None:
        return turn_TLK
    count = min(len(before_TLK), len(turn_TLK))
    joined_TLK: npt.NDArray[np.int16] = turn_TLK.copy()
    known_TLK = before_TLK[:count]
    np.copyto(joined_TLK[:count], known_TLK, where=known_TLK != FREE)
    return joined_TLK


class Conversation:
    """Sequences one after the other: turns continue the last one."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.sequences = [TokenSequence(prompt)]

    @property
    def tokens(self) -> list[int]:
        """All tokens of the current sequence, which the policy continues."""
        return self.sequences[-1].tokens

    def wrote(self, turn: Trajectory) -> None:
        """A turn of the policy, as its engine gave it."""
        self.sequences[-1].wrote(turn)

    def add_outcome(
        self, *, reward: float = 0.0, calls: int = 0, failures: int = 0, seconds: float = 0.0
    ) -> None:
        """Add the environment's reward, tool calls and time to the last turn."""
        last = next(each for each in reversed(self.sequences) if each.turns)
        last.add_outcome(reward=reward, calls=calls, failures=failures, seconds=seconds)

    def given(self, tokens: Sequence[int]) -> None:
        """Add tokens that the policy reads next and did not write."""
        self.sequences[-1].given(tokens)

    def anew(self, prompt: Sequence[int]) -> None:
        """Begin another sequence: the next prompt does not start with the tokens so far."""
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
    kept = [sequence for sequence in sequences if sequence.turns] or sequences[:1]
    earlier, trajectories = 0.0, []
    for part, sequence in enumerate(kept):
        sequence.without_unanswered()
        turns = tuple(turn._replace(reward=0.0) if failure else turn for turn in sequence.turns)
        episode = EpisodePart(part, len(kept), turns, earlier, reward, failure, detail)
        earlier += sum(turn.reward for turn in turns)
        trajectories.append(
            sequence.trajectory(
                row=row,
                prompt_index=prompt_index,
                sample=sample,
                seed=seed,
                finished=finished,
                episode=episode,
            )
        )
    return trajectories
