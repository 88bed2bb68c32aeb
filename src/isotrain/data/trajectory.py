"""A prompt and the policy's response, token by token: the unit from rollout to training.

P: prompt tokens, N: response tokens, T: both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Turn(NamedTuple):
    """One piece of the policy's writing, with the environment's reply to it."""

    start: int
    end: int
    """Response tokens `start` to `end` of its sequence."""
    reward: float
    """For this turn alone."""
    calls: int
    """Tool calls that it asked for."""
    failures: int
    """Tool calls that were malformed or failed."""
    seconds: float
    """Time that the environment took to answer."""


class EpisodePart(NamedTuple):
    """The episode of a sequence, where the policy did not write in one piece.

    An episode is one sequence as long as each turn continues the tokens of those before. Where the chat
    template rewrites them, such as to drop earlier thinking, the turn begins a sequence of its own.
    """

    part: int
    """Which sequence of the episode this is."""
    parts: int
    """How many it has."""
    turns: tuple[Turn, ...]
    """Turns of this sequence."""
    earlier: float = 0.0
    """Rewards of the turns in earlier sequences, together."""
    reward: float | None = None
    """Reward of the environment for all turns; None where rewards are computed elsewhere."""
    failure: str | None = None
    """Why the episode ended before its time."""
    detail: str = ""
    """For a failure, one line about it."""


@dataclass(frozen=True)
class Trajectory:
    """Token ids are the truth: they are never turned into text and back."""

    row: int
    """Number of the prompt in its store."""
    prompt_index: int
    """Number of the prompt in the whole run; responses with the same one are a group."""
    sample: int
    """Which response of the group, or which episode; several sequences can be of one."""
    seed: int
    """Seed that it was sampled with."""
    prompt_length: int
    tokens_T: npt.NDArray[np.int32]
    """The prompt, then the response."""
    mask_N: npt.NDArray[np.bool_]
    """Which response tokens the policy wrote; the others came from tools or environments."""
    logp_N: npt.NDArray[np.float32]
    """Log-probs of the policy that sampled, at its sampling temperature; 0 where it did not write."""
    version_N: npt.NDArray[np.int32]
    """Version of the weights that wrote each token."""
    finished: bool
    """Whether the policy ended the response itself; otherwise it was cut at the longest allowed."""
    episode: EpisodePart | None = None
    """None where the policy answered once."""
    routes_TLK: npt.NDArray[np.int16] | None = None
    """Of a mixture, if wanted: the experts that the engine sent each token to, in each layer that has some;
    -1 for a token that it never read, as the last one."""
    pictures: tuple[str, ...] = ()
    """Digests of the prompt's pictures; whoever needs their pixels has a store of them, by row."""

    @property
    def route_layers(self) -> int:
        """Layers whose experts it has."""
        return 0 if self.routes_TLK is None else self.routes_TLK.shape[1]

    def __post_init__(self) -> None:
        response = len(self.tokens_T) - self.prompt_length
        assert response == len(self.mask_N) == len(self.logp_N) == len(self.version_N)
        assert self.routes_TLK is None or len(self.routes_TLK) == len(self.tokens_T)

    def __len__(self) -> int:
        return len(self.tokens_T)

    @property
    def response_N(self) -> npt.NDArray[np.int32]:
        return self.tokens_T[self.prompt_length :]


def sample_seed(run_seed: int, prompt_index: int, sample: int) -> int:
    """Seed of a response: 31 bits, from the run, the prompt sample and the response alone."""
    digest = hashlib.sha256(f"{run_seed} {prompt_index} {sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def with_common_prompt(sequences: Sequence[Trajectory]) -> list[Trajectory]:
    """The same sequences, divided where they begin to differ, or where the first of them was written.

    Environments may tell each episode something else, and later sequences have longer prompts. What follows
    the common part belongs to the response, as tokens that the policy did not write.
    """
    length = min(t.prompt_length for t in sequences)
    first_T = sequences[0].tokens_T
    for trajectory in sequences[1:]:
        differs_T = trajectory.tokens_T[:length] != first_T[:length]
        if differs_T.any():
            length = int(differs_T.argmax())
    # The first token of all is never a response: nothing would predict it.
    return [_divided(trajectory, max(1, length)) for trajectory in sequences]


def _divided(trajectory: Trajectory, prompt_length: int) -> Trajectory:
    given = trajectory.prompt_length - prompt_length
    if given == 0:
        return trajectory
    episode = trajectory.episode
    if episode is not None:
        turns = tuple(t._replace(start=t.start + given, end=t.end + given) for t in episode.turns)
        episode = episode._replace(turns=turns)
    version = trajectory.version_N[0] if len(trajectory.version_N) else 0
    return replace(
        trajectory,
        prompt_length=prompt_length,
        mask_N=np.concatenate([np.zeros(given, np.bool_), trajectory.mask_N]),
        logp_N=np.concatenate([np.zeros(given, np.float32), trajectory.logp_N]),
        version_N=np.concatenate([np.full(given, version, np.int32), trajectory.version_N]),
        episode=episode,
    )
