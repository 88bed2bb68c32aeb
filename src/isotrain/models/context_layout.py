"""How the tokens of a packed micro-batch are split over the ranks of a context group.

The ranks form `ring` parts of the tokens, and each part is split again over `heads` ranks, which exchange
tokens for heads within attention. With one part, tokens stay in their order. With several, each segment is
cut into twice as many pieces as there are parts, and a part gets the n-th piece from the front and the n-th
from the back: causal attention is then equally much work for all of them.

T: packed tokens, L: this rank's, N: tokens whose states are wanted, M: this rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ContextRank:
    """One of `heads * ring` ranks; those of a part are neighbours."""

    heads: int
    ring: int
    index: int

    @property
    def size(self) -> int:
        return self.heads * self.ring


class Run(NamedTuple):
    """Neighbouring tokens of a segment: from `start` up to `stop`, counted within it."""

    segment: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    lengths: tuple[int, ...]
    """Tokens of each segment. Those that only fill up a part are segments of their own, at the end."""
    continues: tuple[int, ...]
    """For each segment the one that it continues, or -1; empty where none does."""
    parts: tuple[tuple[Run, ...], ...]
    """What each part of the ring holds, in its order."""
    places_L: torch.Tensor
    """Which packed token each of this rank's tokens is; T for those that fill up."""
    order_T: npt.NDArray[np.int64]
    """Where each packed token is among all ranks' tokens, one rank's after the other's."""
    sizes: tuple[int, ...]
    """Tokens of each rank."""


def lay_out(lengths: Sequence[int], continues: Sequence[int], rank: ContextRank) -> Layout:
    """A function of the batch alone: every rank of the group computes it for itself."""
    segments, trunks = list(lengths), list(continues)
    first = (0, *accumulate(lengths))
    parts, places = _parts(lengths, rank.ring), []
    for runs in parts:
        part = np.concatenate(
            [np.zeros(0, np.int64), *(first[s] + np.arange(start, stop) for s, start, stop in runs)]
        )
        missing = -len(part) % rank.heads if len(part) else rank.heads
        if missing:
            runs.append(Run(len(segments), 0, missing))
            segments.append(missing)
            trunks += [-1] if trunks else []
        places += np.split(np.concatenate([part, np.full(missing, first[-1])]), rank.heads)
    order_T = np.empty(first[-1] + 1, np.int64)
    order_T[np.concatenate(places)] = np.arange(sum(map(len, places)))
    return Layout(
        tuple(segments),
        tuple(trunks),
        tuple(map(tuple, parts)),
        torch.from_numpy(places[rank.index]),
        order_T[:-1],
        tuple(map(len, places)),
    )


def _parts(lengths: Sequence[int], ring: int) -> list[list[Run]]:
    """The pieces of all segments for each part of the ring.

    Pieces that get one token more are chosen in turn: many short segments fill all parts alike.
    """
    if ring == 1:
        return [[Run(number, 0, length) for number, length in enumerate(lengths)]]
    pieces, turn = 2 * ring, 0
    parts: list[list[Run]] = [[] for _ in range(ring)]
    for number, length in enumerate(lengths):
        size, more = divmod(length, pieces)
        bounds = (0, *accumulate(size + ((piece - turn) % pieces < more) for piece in range(pieces)))
        turn = (turn + more) % pieces
        for piece in range(pieces):
            if bounds[piece] < bounds[piece + 1]:
                run = Run(number, bounds[piece], bounds[piece + 1])
                parts[min(piece, pieces - 1 - piece)].append(run)
    return parts


@dataclass(frozen=True)
class Wanted:
    """Which of the wanted tokens are whose."""

    counts: tuple[int, ...]
    """How many each rank has."""
    own_M: torch.Tensor
    """Which of them are this rank's."""
    at_M: torch.Tensor
    """Where those are among this rank's tokens."""
    order_N: npt.NDArray[np.int64]
    """Where each is among all ranks' wanted ones, one rank's after the other's."""


def owners(layout: Layout, predict_N: npt.NDArray[np.int64], rank: ContextRank) -> Wanted:
    wanted_N = layout.order_T[predict_N]
    starts = np.array((0, *accumulate(layout.sizes)))
    owner_N = np.searchsorted(starts[1:], wanted_N, side="right")
    own_M = np.flatnonzero(owner_N == rank.index)
    order_N = np.empty(len(owner_N), np.int64)
    order_N[np.argsort(owner_N, kind="stable")] = np.arange(len(owner_N))
    return Wanted(
        tuple(np.bincount(owner_N, minlength=rank.size).tolist()),
        torch.from_numpy(own_M),
        torch.from_numpy(wanted_N[own_M] - starts[rank.index]),
        order_N,
    )
