"""How long responses are: distributions of their numbers of tokens.

P: prompts, G: responses to one prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


class Lengths(Protocol):
    def draw(self, random: np.random.Generator, prompts: int, n: int) -> Counts:
        """Tokens of `n` responses to each prompt: `lengths_PG`, each at least 1."""
        ...


@dataclass(frozen=True)
class Constant:
    tokens: int

    def draw(self, random: np.random.Generator, prompts: int, n: int) -> Counts:
        return np.full((prompts, n), self.tokens, np.int64)


@dataclass(frozen=True)
class Empirical:
    """Drawn with replacement from lengths that were measured."""

    values: tuple[int, ...]

    def draw(self, random: np.random.Generator, prompts: int, n: int) -> Counts:
        return random.choice(np.asarray(self.values, np.int64), (prompts, n))


@dataclass(frozen=True)
class Lognormal:
    """`median` and `sigma` are those before truncation: longer responses end at `longest`.

    `by_prompt` is the share of the variance (of the logarithm) that all responses to one prompt have in
    common: hard prompts get long responses.
    """

    median: float
    sigma: float
    longest: int
    by_prompt: float = 0.0

    def draw(self, random: np.random.Generator, prompts: int, n: int) -> Counts:
        common_P1 = random.standard_normal((prompts, 1)) * math.sqrt(self.by_prompt)
        own_PG = random.standard_normal((prompts, n)) * math.sqrt(1.0 - self.by_prompt)
        lengths_PG = self.median * np.exp(self.sigma * (common_P1 + own_PG))
        return np.clip(np.rint(lengths_PG), 1, self.longest).astype(np.int64)


def lognormal_of(mean: float, longest: int, truncated: float, by_prompt: float = 0.0) -> Lognormal:
    """The distribution with this mean after truncation and this share of truncated responses."""
    if not 0.0 < truncated < 1.0 or not 0.0 < mean < longest:
        raise ValueError("needs 0 < truncated < 1 and 0 < mean < longest")
    limit = _quantile(1.0 - truncated)
    low, high = 1e-3, 6.0
    for _ in range(100):
        sigma = (low + high) / 2
        # A wider distribution with the same share of truncated responses has a smaller mean.
        if _mean(math.log(longest) - limit * sigma, sigma, longest) > mean:
            low = sigma
        else:
            high = sigma
    return Lognormal(math.exp(math.log(longest) - limit * sigma), sigma, longest, by_prompt)


def _mean(mu: float, sigma: float, longest: int) -> float:
    """Of a lognormal distribution whose larger values are set to `longest`."""
    z = (math.log(longest) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _share(z - sigma) + longest * (1.0 - _share(z))


def _share(z: float) -> float:
    return 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))


def _quantile(share: float) -> float:
    low, high = -10.0, 10.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _share(middle) < share else (low, middle)
    return (low + high) / 2
