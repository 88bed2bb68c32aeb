"""Which constants a module's output says are off, and by how much.

N: numbers of the output, C: constants, G: clusters of numbers whose rounding may be shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
Module = Callable[[Array], tuple[Array, Array]]
"""From what its constants are off by, `off_C`, to its output and the slopes: `output_N`, `slope_NC`."""

_ITERATIONS, _HALVINGS = 20, 8
# A step that removes less of the squared residual than this changes no digit that the error leaves.
_ENOUGH = 1e-4
# Of the slopes' correlation matrix; beyond it, constants cannot be told from each other in float64.
_LARGEST_CONDITION = 1e10
# Standard errors beyond which a constant is fitted too; whether it is off, the reader decides.
_FITTED = 4.0
# Below so many, a constant is not needed beside another one: either may be the one that is off.
_NEEDED = 3.0


@dataclass(frozen=True)
class FittedConstant:
    off: float
    error: float | None
    """Standard error; None where the output does not depend on the constant, or not on it alone."""
    effect: float
    """By which share of its norm the output changes per unit of `off`."""
    confused: tuple[int, ...] = ()
    """Constants that explain as much as this one does."""


@dataclass(frozen=True)
class Fit:
    estimates: tuple[FittedConstant, ...]
    clusters: int
    rest: float
    """Norm of what the constants do not explain."""


@dataclass(frozen=True)
class _Place:
    """The module at some constants."""

    off_C: Array
    slope_NC: Array
    rest_N: Array

    @property
    def squares(self) -> float:
        return float(self.rest_N @ self.rest_N)


def fit(module: Module, observed_N: Array, cluster_N: Labels, start_C: Array) -> Fit:
    """Constants are taken in one by one, the most significant first, until none is left that is.

    Each one is estimated with those that were taken in before it. All at once would be honest too, and blind:
    where rows are alike in size, an epsilon is told from a gain only by assuming that one of them is right.
    """
    labels, label_N = np.unique(cluster_N, return_inverse=True)
    clusters = len(labels)
    place = _at(module, observed_N, start_C)
    # What a start already says is off, is being fitted.
    fitted = [int(c) for c in np.flatnonzero(start_C)]
    if fitted:
        place = _descended(module, observed_N, place, fitted)
    while True:
        others = [c for c in range(len(start_C)) if c not in fitted]
        one_more = {c: _estimated(place, [*fitted, c], label_N, clusters)[-1] for c in others}
        strength = {c: abs(off / error) if error else 0.0 for c, (off, error) in one_more.items()}
        if not strength or max(strength.values()) < _FITTED:
            break
        fitted.append(max(strength, key=lambda c: strength[c]))
        place = _descended(module, observed_N, place, fitted)
    together = dict(zip(fitted, _estimated(place, fitted, label_N, clusters), strict=True))
    confused = {c: _confused(place, fitted, c, others, label_N, clusters) for c in fitted}
    output_norm = float(np.linalg.norm(observed_N)) or 1.0
    estimates = [
        FittedConstant(
            float(place.off_C[c]) + (together[c][0] if c in together else one_more[c][0]),
            together[c][1] if c in together else one_more[c][1],
            float(np.linalg.norm(place.slope_NC[:, c])) / output_norm,
            confused.get(c, ()),
        )
        for c in range(len(start_C))
    ]
    return Fit(tuple(estimates), clusters, math.sqrt(place.squares))


def _at(module: Module, observed_N: Array, off_C: Array) -> _Place:
    output_N, slope_NC = module(off_C)
    return _Place(off_C, slope_NC, observed_N - output_N)


def _descended(module: Module, observed_N: Array, place: _Place, fitted: Sequence[int]) -> _Place:
    """Gauss-Newton: a constant that is far off is found too, not only its first order."""
    for _ in range(_ITERATIONS):
        step_C = np.zeros_like(place.off_C)
        step_C[list(fitted)] = _solved(place.slope_NC[:, list(fitted)], place.rest_N)[0]
        for _ in range(_HALVINGS):
            there = _at(module, observed_N, place.off_C + step_C)
            if there.squares <= place.squares:
                break
            step_C = step_C / 2
        else:
            return place
        gained, place = place.squares - there.squares, there
        if gained <= _ENOUGH * place.squares:
            return place
    return place


def _solved(slope_NC: Array, rest_N: Array) -> tuple[Array, Array | None]:
    """The least-squares step and the inverse of `slope' slope`; None where constants cannot be told apart."""
    size_C = np.sqrt((slope_NC * slope_NC).sum(0))
    if not len(size_C) or not size_C.all():
        return np.zeros_like(size_C), None
    unit_NC = slope_NC / size_C
    gram_CC = unit_NC.T @ unit_NC
    if np.linalg.cond(gram_CC) > _LARGEST_CONDITION:
        return np.zeros_like(size_C), None
    inverse_CC = np.linalg.inv(gram_CC)
    return inverse_CC @ (unit_NC.T @ rest_N) / size_C, inverse_CC / np.outer(size_C, size_C)


def _estimated(
    place: _Place, constants: Sequence[int], label_N: Labels, clusters: int
) -> list[tuple[float, float | None]]:
    """One step for these constants together, with standard errors from leaving out one cluster at a time.

    This jackknife holds for few clusters of unequal weight too, where the plain sandwich is too narrow.
    """
    slope_NC = place.slope_NC[:, list(constants)]
    step_C, inverse_CC = _solved(slope_NC, place.rest_N)
    if inverse_CC is None or clusters < 2:
        return [(0.0, None)] * len(constants)
    left_N = place.rest_N - slope_NC @ step_C
    # In units in which all constants matter alike: sizes may be many digits apart.
    unit_NC = slope_NC / np.sqrt((slope_NC * slope_NC).sum(0))
    sums = [
        np.bincount(label_N, one_N * other_N, clusters)
        for one_N in unit_NC.T
        for other_N in (*unit_NC.T, left_N)
    ]
    both_GCX = np.stack(sums, -1).reshape(clusters, len(constants), len(constants) + 1)
    others_GCC, score_GC1 = both_GCX[..., :-1].sum(0) - both_GCX[..., :-1], both_GCX[..., -1:]
    if np.linalg.cond(others_GCC).max() > _LARGEST_CONDITION:
        return [(0.0, None)] * len(constants)  # one cluster alone tells them
    moved_GC = np.linalg.solve(others_GCC, score_GC1)[..., 0]
    errors = np.sqrt((moved_GC * moved_GC).sum(0) * (clusters - 1) / clusters)
    errors /= np.sqrt((slope_NC * slope_NC).sum(0))
    return [(float(step), float(error)) for step, error in zip(step_C, errors, strict=True)]


def _confused(
    place: _Place,
    fitted: Sequence[int],
    constant: int,
    others: Sequence[int],
    label_N: Labels,
    clusters: int,
) -> tuple[int, ...]:
    """Other constants beside which this one is no longer needed."""
    alike = []
    for other in others:
        _, error = _estimated(place, [*fitted, other], label_N, clusters)[fitted.index(constant)]
        if error is None or abs(place.off_C[constant]) < _NEEDED * error:
            alike.append(other)
    return tuple(alike)
