"""Numbers of a first step that are known without a reference run: nothing has been learnt yet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from isotrain.language import listed, tr
from isotrain.tools.parity.levels.level import Check
from isotrain.tools.parity.run import RunLog, section

# By how much rounding may move the log-prob of a whole response between two passes, in nats.
_ROUNDING = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.2}
# Advantages are whitened over the tokens of the step by these, and centred in their groups by those.
_WHITENED = ("ppo", "reinforce++", "reinforce++-baseline")
_CENTRED = ("grpo", "rloo")
_WHITENED_MEAN = 1e-4


def anchors(run: RunLog) -> tuple[Check, ...]:
    """Values that the first step must have by its definition, beside the run's; empty where nothing is known.

    `value` is the distance from the known number.
    """
    recipe = run.recipe or {}
    algorithm = section(recipe, "algorithm")
    rounding = _ROUNDING.get(str(section(recipe, "model").get("dtype")))
    if rounding is None:
        return ()
    name = algorithm.get("name")
    if name == "dpo":
        return tuple(_dpo(run, algorithm, rounding))
    if name == "kto":
        return tuple(_kto(run, algorithm, rounding))
    return tuple(_online(run, recipe, algorithm, rounding))


def _dpo(run: RunLog, algorithm: dict[str, Any], rounding: float) -> Iterator[Check]:
    """The reference is the policy before its first update: no response is preferred yet."""
    beta = _number(algorithm.get("beta"), 0.1) or 0.1
    match algorithm.get("loss"):
        case "sigmoid":
            yield from _check(run, "train/loss", math.log(2), beta * rounding / 2, "DPO: ln 2")
        case "ipo":
            expected = 1 / (4 * beta * beta)
            yield from _check(run, "train/loss", expected, rounding / beta, "IPO: 1 / (4 beta^2)")
        case _:
            return
    yield from _check(run, "train/margin", 0.0, beta * rounding, tr("no response is preferred yet"))


def _kto(run: RunLog, algorithm: dict[str, Any], rounding: float) -> Iterator[Check]:
    weight = _number(algorithm.get("desirable_weight"), 1.0)
    if weight == _number(algorithm.get("undesirable_weight"), 1.0):
        tolerance = weight * _number(algorithm.get("beta"), 0.1) * rounding / 4
        yield from _check(run, "train/loss", weight / 2, tolerance, tr("KTO: half of the responses' weight"))
    yield from _check(run, "train/kl", 0.0, rounding, tr("KTO: the policy is its reference"))


def _online(
    run: RunLog, recipe: dict[str, Any], algorithm: dict[str, Any], rounding: float
) -> Iterator[Check]:
    updated_once = algorithm.get("ppo_epochs") == 1 and algorithm.get("mini_batch_size") in (
        None,
        section(recipe, "data").get("batch_size"),
    )
    if updated_once:
        for metric in ("actor/ppo_kl", "actor/pg_clipfrac"):
            yield from _check(run, metric, 0.0, 0.0, tr("the only update: old and new policy are one"))
        yield from _check(run, "actor/kl_loss", 0.0, rounding / 100, tr("the policy is its reference"))
    yield from _check(run, "actor/reward_kl_penalty", 0.0, rounding / 100, tr("the policy is its reference"))
    mean, name = "critic/advantages/mean", algorithm.get("name")
    if name in _WHITENED:
        yield from _check(run, mean, 0.0, _WHITENED_MEAN, tr("whitened over the tokens of the step"))
    responses = _number(section(recipe, "rollout").get("n"), 1)
    # The metric is a mean over tokens: it is that over responses where all are of one length.
    lengths = {_first(run, f"response_length/{end}") for end in ("min", "max")}
    if name in _CENTRED and responses > 1 and len(lengths) == 1 and None not in lengths:
        yield from _check(run, mean, 0.0, _WHITENED_MEAN, tr("advantages of a group add up to 0"))


def _check(run: RunLog, metric: str, expected: float, tolerance: float, why: str) -> Iterator[Check]:
    value = _first(run, metric)
    if value is not None:
        distance = abs(value - expected)
        note = tr("{why}; {found:.6g} in {run}", why=why, found=value, run=run.path.name)
        what = tr("{metric} at step 1", metric=metric)
        yield Check(what, distance, tolerance, bool(distance <= tolerance), note)


def _first(run: RunLog, metric: str) -> float | None:
    series = run.metrics.get(metric)
    if series is None:
        return None
    at = (series.steps_S == 1).nonzero()[0]
    return float(series.values_S[at[0]]) if len(at) else None


def _number(value: Any, default: float) -> float:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    return float(value) if usable else default


def anchor_checks(reference: RunLog, candidate: RunLog) -> tuple[tuple[Check, ...], list[str]]:
    """Anchors of the candidate, and those that only the candidate misses."""
    expected, checks = anchors(reference), anchors(candidate)
    missed_by_both = {check.name for check in expected if not check.passed}
    failed = [check for check in checks if not check.passed and check.name not in missed_by_both]
    return checks, [listed((check.name, check.note), ": ") for check in failed]
