"""Drawn tokens reduced to sums about the sampler, which any number of positions fits into.

Q: positions, V: the vocabulary, G: temperatures of a grid, B: bins. In `_Cut`, V runs from the most likely
token down; elsewhere in the order of ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# Factors on the inverse of the asked temperature, at which the likelihood is known.
FACTORS_G: Floats = np.exp(np.linspace(np.log(0.5), np.log(2.0), 17))
# The temperature is estimated from tokens that a sampler draws from at any temperature down to this share of
# the asked one: what a wrong boundary leaves out, or lets in, then has no say in it.
COLDEST = 0.9
BINS = 20


@dataclass(frozen=True)
class Settings:
    """How tokens were to be drawn: by temperature, then top-k, then top-p of what is left."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    epsilon: float = 2e-4
    """Distance in probability and in log-probs below which rounding decides at a boundary. For float32."""

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and 0 < self.top_p <= 1 and (self.top_k == -1 or self.top_k > 0)):
            raise ValueError("temperature and top_p must be above 0, top_p at most 1, top_k -1 or above 0")


@dataclass
class Boundary:
    """Draws near the boundary of top-p or of top-k, over the positions where that one cuts."""

    positions: int = 0
    sharp: int = 0
    """Positions among these whose last token no rounding can cut off."""
    last: int = 0
    """Draws of the last token that is left in, where sharp."""
    expected: float = 0.0
    variance: float = 0.0
    outside: int = 0
    """Draws of tokens that are left out by more than rounding explains."""
    next_outside: int = 0
    """Draws among these of the first token that is left out."""
    left_out: float = 0.0
    """Draws of left out tokens to expect from a sampler that does not cut."""


@dataclass
class Drawn:
    """Sums over positions; `add` them in parts of any size."""

    settings: Settings
    seed: int = 0
    """Seed of the numbers that spread the steps of a discrete distribution; fixed, so that results repeat."""
    count: int = 0
    clear: int = 0
    """Positions where rounding does not decide which tokens are left in; the shares are of these."""
    by_rank_B: Integers = field(default_factory=lambda: np.zeros(BINS, np.int64))
    """Positions by the share of probability before the drawn token, from the most likely token down."""
    by_id_B: Integers = field(default_factory=lambda: np.zeros(BINS, np.int64))
    rank_sum: float = 0.0
    best: int = 0
    """Draws of the most likely token, with what to expect."""
    best_expected: float = 0.0
    best_variance: float = 0.0
    tokens: dict[int, int] = field(default_factory=dict)
    """All draws, by token."""
    zero: int = 0
    """Draws of token 0, with what to expect."""
    zero_expected: float = 0.0
    zero_variance: float = 0.0
    score: float = 0.0
    """Derivative of the log-likelihood at the asked temperature, by the logarithm of its inverse."""
    information: float = 0.0
    drawn_logits: float = 0.0
    normalizers_G: Floats = field(default_factory=lambda: np.zeros(len(FACTORS_G)))
    top_p: Boundary = field(default_factory=Boundary)
    top_k: Boundary = field(default_factory=Boundary)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def add(self, logits_QV: npt.NDArray[np.floating], tokens_Q: npt.NDArray[np.integer]) -> None:
        """Logits or log-probs at temperature 1, as the host computed them, and the token drawn at each."""
        logits_QV = np.asarray(logits_QV, np.float64) / self.settings.temperature
        drawn_Q: Integers = np.asarray(tokens_Q, np.int64)
        if logits_QV.ndim != 2 or drawn_Q.shape != logits_QV.shape[:1] or not logits_QV.size:
            raise ValueError("one row of log-probs for each drawn token is needed")
        if not np.isfinite(logits_QV.max(1)).all() or np.isnan(logits_QV).any():
            raise ValueError("log-probs must be numbers; minus infinity is the lowest")
        if ((drawn_Q < 0) | (drawn_Q >= logits_QV.shape[1])).any():
            raise ValueError("a drawn token is outside the vocabulary")
        cut = _cut(logits_QV, drawn_Q, self.settings)
        self.count += len(drawn_Q)
        for token, times in zip(*np.unique(drawn_Q, return_counts=True), strict=True):
            self.tokens[int(token)] = self.tokens.get(int(token), 0) + int(times)
        clear_Q = ~_unclear(cut, self.settings)
        if clear_Q.any():
            self.clear += int(clear_Q.sum())
            self._add_shares(cut.at(clear_Q), drawn_Q[clear_Q])
            self._add_best(cut.at(clear_Q))
        self._add_temperature(cut)
        for rule, boundary in (("top_p", self.top_p), ("top_k", self.top_k)):
            _add_boundary(boundary, cut, rule, self.settings)

    def _add_shares(self, cut: _Cut, tokens_Q: Integers) -> None:
        """The probability integral transform: uniform if the distributions are right, whatever they are."""
        rows_Q = np.arange(len(tokens_Q))
        inside_QV = np.where(cut.kept_QV, cut.p_QV, 0.0)
        spread_Q = self._random.random(len(tokens_Q))
        p_Q = inside_QV[rows_Q, cut.rank_Q]
        before_Q = np.cumsum(inside_QV, 1)[rows_Q, cut.rank_Q] - p_Q
        u_Q = np.clip(before_Q + spread_Q * p_Q, 0.0, 1.0)
        self.rank_sum += float(u_Q.sum())
        self.by_rank_B += _histogram(u_Q)
        by_id_QV = np.empty_like(inside_QV)
        np.put_along_axis(by_id_QV, cut.order_QV, inside_QV, 1)
        id_Q = np.cumsum(by_id_QV, 1)[rows_Q, tokens_Q] - p_Q + spread_Q * p_Q
        self.by_id_B += _histogram(np.clip(id_Q, 0.0, 1.0))
        zero_Q = by_id_QV[:, 0]
        self.zero += int((tokens_Q == 0).sum())
        self.zero_expected += float(zero_Q.sum())
        self.zero_variance += float((zero_Q * (1 - zero_Q)).sum())

    def _add_best(self, cut: _Cut) -> None:
        best_Q, rows_Q = cut.p_QV[:, 0], np.arange(len(cut.rank_Q))
        self.best += int((cut.sorted_QV[rows_Q, cut.rank_Q] == cut.sorted_QV[:, 0]).sum())
        # Several tokens may be the most likely one.
        ties_Q = (cut.sorted_QV == cut.sorted_QV[:, :1]).sum(1)
        all_best_Q = np.minimum(best_Q * ties_Q, 1.0)
        self.best_expected += float(all_best_Q.sum())
        self.best_variance += float((all_best_Q * (1 - all_best_Q)).sum())

    def _add_temperature(self, cut: _Cut) -> None:
        """The likelihood given that the token is in the core, from which every temperature draws."""
        core_QV = _core(cut, self.settings)
        rows_Q = np.arange(len(cut.rank_Q))
        used_Q = core_QV[rows_Q, cut.rank_Q] & (core_QV.sum(1) > 1)
        if not used_Q.any():
            return
        logits_QV = np.where(core_QV, cut.sorted_QV - cut.sorted_QV[:, :1], -np.inf)[used_Q]
        drawn_Q = logits_QV[np.arange(len(logits_QV)), cut.rank_Q[used_Q]]
        self.drawn_logits += float(drawn_Q.sum())
        for place, factor in enumerate(FACTORS_G):
            self.normalizers_G[place] += float(np.log(np.exp(factor * logits_QV).sum(1)).sum())
        p_QV = np.exp(logits_QV)
        p_QV /= p_QV.sum(1, keepdims=True)
        finite_QV = np.where(np.isfinite(logits_QV), logits_QV, 0.0)
        mean_Q = (p_QV * finite_QV).sum(1)
        self.score += float((drawn_Q - mean_Q).sum())
        self.information += float((p_QV * (finite_QV - mean_Q[:, None]) ** 2).sum())


@dataclass(frozen=True)
class _Cut:
    """Positions with their tokens from the most likely one down, and what the settings leave of them."""

    order_QV: Integers
    sorted_QV: Floats
    """Log-probs at the asked temperature, but for a constant."""
    kept_QV: Flags
    p_QV: Floats
    """Log-probs: of kept tokens, as they are to be drawn; of the others, as if nothing were cut."""
    before_QV: Floats
    """Probability of all more likely tokens, after top-k."""
    by_k_Q: Integers
    """How many tokens top-k keeps."""
    rank_Q: Integers
    """Where the drawn token is."""

    @property
    def kept_Q(self) -> Integers:
        counts_Q: Integers = self.kept_QV.sum(1).astype(np.int64)
        return counts_Q

    def at(self, chosen_Q: Flags) -> _Cut:
        return _Cut(*(getattr(self, part.name)[chosen_Q] for part in fields(self)))


def _cut(logits_QV: Floats, tokens_Q: Integers, settings: Settings) -> _Cut:
    order_QV = np.argsort(-logits_QV, axis=1, kind="stable")
    sorted_QV = np.take_along_axis(logits_QV, order_QV, 1)
    whole_QV = np.exp(sorted_QV - sorted_QV[:, :1])
    whole_QV /= whole_QV.sum(1, keepdims=True)
    kept_QV = np.isfinite(sorted_QV)
    if 0 < settings.top_k < sorted_QV.shape[1]:
        kept_QV &= sorted_QV >= sorted_QV[:, settings.top_k - 1 : settings.top_k]  # ties stay, as in engines
    by_k_Q = kept_QV.sum(1).astype(np.int64)
    left_QV = np.where(kept_QV, whole_QV, 0.0)
    left_QV /= left_QV.sum(1, keepdims=True)
    before_QV = np.cumsum(left_QV, 1) - left_QV
    if settings.top_p < 1:
        kept_QV = kept_QV & (before_QV < settings.top_p)
        kept_QV[:, 0] = True
    p_QV = np.where(kept_QV, left_QV, 0.0)
    p_QV /= p_QV.sum(1, keepdims=True)
    rank_Q = (order_QV == tokens_Q[:, None]).argmax(1).astype(np.int64)
    return _Cut(order_QV, sorted_QV, kept_QV, np.where(kept_QV, p_QV, whole_QV), before_QV, by_k_Q, rank_Q)


def _core(cut: _Cut, settings: Settings) -> Flags:
    """Tokens that are kept at any temperature in question, whichever side of the boundary errors are on."""
    core_QV: Flags = cut.kept_QV.copy()
    places_V = np.arange(core_QV.shape[1])
    if settings.top_p < 1:
        in_k_QV = places_V < cut.by_k_Q[:, None]
        cold_QV = np.where(in_k_QV, np.exp((cut.sorted_QV - cut.sorted_QV[:, :1]) / COLDEST), 0.0)
        cold_QV /= cold_QV.sum(1, keepdims=True)
        core_QV &= np.cumsum(cold_QV, 1) - cold_QV < settings.top_p
    cuts_Q = cut.kept_Q < core_QV.shape[1]
    last_Q = cut.sorted_QV[np.arange(len(cuts_Q)), cut.kept_Q - 1]
    core_QV &= ~(cuts_Q[:, None] & (cut.sorted_QV <= last_Q[:, None] + settings.epsilon))
    return core_QV


def _unclear(cut: _Cut, settings: Settings) -> Flags:
    """Where a little more or less of a probability leaves in one token more or less."""
    size, kept_Q = cut.kept_QV.shape[1], cut.kept_Q
    rows_Q, last_Q, next_Q = np.arange(len(kept_Q)), kept_Q - 1, np.minimum(kept_Q, size - 1)
    cuts_Q = kept_Q < size
    gap_Q = np.where(cuts_Q, cut.sorted_QV[rows_Q, last_Q] - cut.sorted_QV[rows_Q, next_Q], np.inf)
    # Ties that top-k leaves in: an engine may leave in some of them only.
    unclear_Q: Flags = (gap_Q <= settings.epsilon) | (
        cuts_Q & (kept_Q == cut.by_k_Q) & (kept_Q > settings.top_k)
    )
    if settings.top_p < 1:
        # The last token would go if top-p were a little lower, and the next one come if it were higher.
        for place_Q in (last_Q, next_Q):
            unclear_Q |= cuts_Q & (np.abs(cut.before_QV[rows_Q, place_Q] - settings.top_p) < settings.epsilon)
    return unclear_Q


def _add_boundary(boundary: Boundary, cut: _Cut, rule: str, settings: Settings) -> None:
    kept_Q, size = cut.kept_Q, cut.kept_QV.shape[1]
    by_p_Q = kept_Q < cut.by_k_Q
    here_Q = by_p_Q if rule == "top_p" else (~by_p_Q & (cut.by_k_Q < size))
    if not here_Q.any():
        return
    rows_Q, last_Q = np.arange(len(kept_Q)), kept_Q - 1
    beyond_Q = cut.sorted_QV[rows_Q, last_Q] - cut.sorted_QV[rows_Q, cut.rank_Q]
    if rule == "top_p":
        beyond_Q = np.minimum(beyond_Q, cut.before_QV[rows_Q, cut.rank_Q] - settings.top_p)
    sharp_Q = here_Q & ~_unclear(cut, settings) & (kept_Q > 1)
    p_Q = cut.p_QV[rows_Q, last_Q]
    outside_Q = here_Q & (cut.rank_Q >= kept_Q) & (beyond_Q > settings.epsilon)
    boundary.positions += int(here_Q.sum())
    boundary.sharp += int(sharp_Q.sum())
    boundary.last += int((sharp_Q & (cut.rank_Q == last_Q)).sum())
    boundary.expected += float(p_Q[sharp_Q].sum())
    boundary.variance += float((p_Q * (1 - p_Q))[sharp_Q].sum())
    boundary.outside += int(outside_Q.sum())
    boundary.next_outside += int((outside_Q & (cut.rank_Q == kept_Q)).sum())
    boundary.left_out += float(np.where(cut.kept_QV, 0.0, cut.p_QV)[here_Q].sum())


def _histogram(u_Q: Floats) -> Integers:
    return np.bincount(np.minimum((u_Q * BINS).astype(np.int64), BINS - 1), minlength=BINS).astype(np.int64)
