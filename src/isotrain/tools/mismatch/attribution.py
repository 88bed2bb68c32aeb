"""Shares of the causes in a mismatch, from experiments that remove the causes one at a time.

An experiment gives the difference `trainer - engine` of each token's log-prob while some causes are removed.
Along an order of the causes their mean square falls step by step, so the steps add up to the whole. The
share of a cause is its step's part of it; for independent causes that is the share in the variance. In low
precision each experiment rounds anew: squares then stay what they were, while the differences themselves are
others, and a linear measure would count the old rounding as removed. A step depends on what was removed
before it: the order is walked from both ends, and a cause whose two steps disagree is called shared.

R: sequences, N: tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Removed = frozenset[str]
Experiments = Mapping[Removed, Sequence[Array]]
"""`trainer - engine` of each sequence's tokens, by the causes that are removed."""

REST = "rest"
# Of the whole: by how much the two orders may differ before a cause is called shared.
SHARED = 0.1
DRAWS = 2000
# Two sequences tell nothing about the spread between sequences.
FEWEST_SEQUENCES = 4


@dataclass(frozen=True)
class Share:
    """Nats per token that are due to a cause: its part of the squares, of the mean absolute difference.

    `low` to `high` is a 95 % interval over sequences.
    """

    cause: str
    nats: float
    low: float
    high: float
    first: float
    """Removed in the order of the causes."""
    last: float
    """Removed in the reverse order."""
    shared: bool
    """Whether the two orders disagree: the cause acts together with another one."""


@dataclass(frozen=True)
class Attribution:
    total: float
    """Mean absolute difference of log-probs, in nats per token."""
    shares: tuple[Share, ...]
    rest: Share
    sequences: int
    tokens: int

    def part(self, share: Share) -> float:
        """The share as a fraction of the whole."""
        return share.nats / self.total if self.total else 0.0

    @property
    def ranked(self) -> list[Share]:
        return sorted(self.shares, key=lambda share: -share.nats)


def steps(order: Sequence[str]) -> Iterator[tuple[str, Removed, Removed]]:
    """Each cause of an order, what was removed before it, and that together with it."""
    removed: Removed = frozenset()
    for cause in order:
        yield cause, removed, removed | {cause}
        removed = removed | {cause}


def needed(order: Sequence[str]) -> list[Removed]:
    """The experiments of both orders, each once."""
    both = [*steps(order), *steps(order[::-1])]
    return list(dict.fromkeys([frozenset(), *(after for _, _, after in both)]))


def attribute(experiments: Experiments, order: Sequence[str], *, seed: int = 0) -> Attribution:
    """The shares of the causes of `order`, and the rest that is left when all are removed."""
    whole = experiments[frozenset()]
    counts_R = np.array([len(d_N) for d_N in whole], float)
    absolute_R = np.array([np.abs(d_N).sum() for d_N in whole])
    tokens = int(counts_R.sum())
    if not tokens:
        return Attribution(0.0, (), Share(REST, 0.0, 0.0, 0.0, 0.0, 0.0, False), len(whole), 0)
    squares = {removed: np.array([d_N @ d_N for d_N in experiments[removed]]) for removed in needed(order)}
    first = {cause: squares[before] - squares[after] for cause, before, after in steps(order)}
    last = {cause: squares[before] - squares[after] for cause, before, after in steps(order[::-1])}
    draws = np.random.default_rng(seed).integers(0, len(whole), (DRAWS, len(whole)))
    total = float(absolute_R.sum()) / tokens

    def nats(part_R: Array, rows: Any = slice(None)) -> Any:
        """A part of the squares in nats per token, over some sequences."""
        per_token = absolute_R[rows].sum(-1) / counts_R[rows].sum(-1)
        whole = squares[frozenset()][rows].sum(-1)
        return part_R[rows].sum(-1) * per_token / np.where(whole == 0, 1.0, whole) * (whole != 0)

    def share(cause: str, first_R: Array, last_R: Array) -> Share:
        low, high = np.quantile(nats((first_R + last_R) / 2, draws), [0.025, 0.975])
        ends = float(nats(first_R)), float(nats(last_R))
        apart = abs(ends[0] - ends[1]) > SHARED * total
        return Share(cause, sum(ends) / 2, float(low), float(high), *ends, shared=bool(apart))

    left_R = squares[frozenset(order)]
    shares = tuple(share(cause, first[cause], last[cause]) for cause in order)
    return Attribution(total, shares, share(REST, left_R, left_R), len(whole), tokens)
