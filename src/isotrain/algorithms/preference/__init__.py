"""Losses over preferences, by name."""

from __future__ import annotations

from collections.abc import Callable

from isotrain.algorithms.preference.dpo import dpo
from isotrain.algorithms.preference.ipo import ipo
from isotrain.algorithms.preference.orpo import orpo
from isotrain.algorithms.preference.pairs import PairLosses
from isotrain.algorithms.preference.simpo import simpo

# All are called as `loss(chosen, rejected, **options)`, two `Side`s of the same pairs.
PREFERENCE_LOSSES: dict[str, Callable[..., PairLosses]] = {
    "sigmoid": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
}
