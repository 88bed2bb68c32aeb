"""Which queries of one part of a ring see which keys of another, as blocks that one kernel call computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

# Queries of a block where only near keys are seen: the mask stays small, and few keys are computed in vain.
BAND_QUERIES = 1024

Piece = tuple[int, int, int]
"""Neighbouring tokens of a segment: its number, the first, and the one after the last."""


class Block(NamedTuple):
    """Queries and keys, by their places within their parts."""

    queries: slice
    keys: slice
    causal: bool = False
    """Both are the same tokens, and each sees those up to itself; otherwise all keys are seen."""
    distance: int | None = None
    """With a window: tokens from the first key to the first query; a mask says which keys are seen."""


class _Held(NamedTuple):
    """The pieces of a segment within a part, which lie side by side there."""

    first: int
    pieces: tuple[tuple[int, int], ...]

    def tokens(self, start: int, stop: int) -> slice:
        """Places of some of the pieces."""
        before = self.first + sum(b - a for a, b in self.pieces[:start])
        return slice(before, before + sum(b - a for a, b in self.pieces[start:stop]))


@dataclass(frozen=True)
class RingTokens:
    """Which tokens each part holds, and which of them see each other."""

    parts: Sequence[Sequence[Piece]]
    lengths: Sequence[int]
    continues: Sequence[int]
    """For each segment the one that it continues, or -1; may be empty."""

    def size(self, part: int) -> int:
        return sum(stop - start for _, start, stop in self.parts[part])

    def blocks(self, own: int, other: int, window: int | None = None) -> Iterator[Block]:
        """Queries of the part `own` with keys of the part `other`."""
        theirs = self._held[other]
        for segment, queries in self._held[own].items():
            trunk = self.continues[segment] if self.continues else -1
            offset = self.lengths[trunk] if trunk >= 0 else 0
            for keys, before in ((theirs.get(trunk), offset), (theirs.get(segment), 0)):
                if keys is None:
                    continue
                if window is not None:
                    yield from _near(queries, keys, before, window)
                elif before:
                    yield Block(queries.tokens(0, len(queries.pieces)), keys.tokens(0, len(keys.pieces)))
                else:
                    yield from _earlier(queries, keys, same=own == other)

    @cached_property
    def _held(self) -> list[dict[int, _Held]]:
        held = []
        for part in self.parts:
            segments, first = {}, 0
            for segment, pieces in groupby(part, key=lambda piece: piece[0]):
                spans = tuple((start, stop) for _, start, stop in pieces)
                segments[segment] = _Held(first, spans)
                first += sum(stop - start for start, stop in spans)
            held.append(segments)
        return held


def _earlier(queries: _Held, keys: _Held, same: bool) -> Iterator[Block]:
    """Pieces of one segment do not overlap: of another part's, each is seen by all of a piece or by none."""
    if same:
        yield Block(queries.tokens(0, len(queries.pieces)), keys.tokens(0, len(keys.pieces)), causal=True)
        return
    seen = [sum(stop <= start for _, stop in keys.pieces) for start, _ in queries.pieces]
    for number, alike in groupby(range(len(seen)), key=lambda piece: seen[piece]):
        pieces = list(alike)
        if number:
            yield Block(queries.tokens(pieces[0], pieces[-1] + 1), keys.tokens(0, number))


def _near(queries: _Held, keys: _Held, before: int, window: int) -> Iterator[Block]:
    """Keys among the last `window` tokens up to each query; `before` tokens precede the queries' segment."""
    for q, (query_start, query_end) in enumerate(queries.pieces):
        place = queries.tokens(q, q + 1).start - query_start
        for start in range(query_start, query_end, BAND_QUERIES):
            stop = min(start + BAND_QUERIES, query_end)
            for k, (key_start, key_end) in enumerate(keys.pieces):
                low = max(key_start, before + start - window + 1)
                high = min(key_end, before + stop)
                if low < high:
                    at = keys.tokens(k, k + 1).start - key_start
                    yield Block(
                        slice(place + start, place + stop),
                        slice(at + low, at + high),
                        distance=before + start - low,
                    )
