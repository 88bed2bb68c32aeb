"""Which constants of a model are not what its config states, by name and size, in two runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from isotrain.language import listed, tr
from isotrain.tools.parity.read.score_tests import Estimate, Module, Record, read_score_tests

State = Literal["as stated", "off", "not resolved", "unexplained"]

# The chance that any interval of a comparison misses its constant, shared out over all of them.
FAMILY_WISE = 0.01
# A constant that is rounded to nearest in bfloat16 is off by up to 2^-9 of itself, which is honest. What
# float32 devices round their products to has 11 digits.
_ROUNDED = {"float32": 2.0**-11, "bfloat16": 2.0**-9, "float16": 2.0**-11}
# Gains and biases of norms and attentions are not rounded constants. What honest rounding moves them by on
# average was at most 0.01 %: products of two bfloat16 numbers are so much too small, rounded to nearest.
# Cosines near 1 are all rounded to 1, which is a constant's rounding again.
_MOVED = {"float32": 1e-4, "bfloat16": 5e-4, "float16": 5e-4}
# An epsilon is stated to one digit; and what it is off by must move the output as much as a gain must.
_EPSILON_OFF = 0.1
_EPSILON_EFFECT = {"float32": 1e-6, "bfloat16": 5e-4, "float16": 5e-4}
# A constant is known to be right where its interval is this narrow; otherwise the test could not have told.
_RESOLVED = {"scale": 0.01, "base": 0.01, "gain": 0.01, "bias": 0.01, "epsilon": 1.0}
# What no constant explains, in units of the expected rounding: honest modules were at most at 1.1 in
# bfloat16 and at 4.3 in float32. Beyond it, a constant would only be the nearest name for another mistake.
_LARGEST_REST = {"float32": 64.0, "bfloat16": 4.0, "float16": 4.0}

_CALLED = {
    ("attention", "scale"): tr("the attention scale"),
    ("norm", "epsilon"): tr("the norm's epsilon"),
    ("rotary", "base"): tr("the rotary base"),
    ("rotary", "gain"): tr("the gain of cosines and sines"),
    ("attention", "gain"): tr("the gain of the attention's output"),
    ("attention", "bias"): tr("the bias of the attention's output"),
    ("norm", "gain"): tr("the norm's gain"),
    ("norm", "bias"): tr("the norm's bias"),
}


@dataclass(frozen=True)
class EstimatedConstant:
    """One run's constant: what it is off by, with the interval at the family-wise level."""

    state: State
    off: float
    low: float
    high: float
    confused: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConstantDifference:
    """One constant of one module in two runs; of a bias, shares are those of the output's size."""

    module: str
    kind: str
    constant: str
    stated: float | None
    """By the candidate's config."""
    stated_ratio: float
    """Over what the reference's config states."""
    reference: EstimatedConstant
    candidate: EstimatedConstant
    difference: float
    """The candidate's constant minus the reference's, as a share of what the reference's config states."""
    low: float
    high: float
    different: bool

    @property
    def words(self) -> str:
        if self.stated_ratio != 1 and self.stated is not None:
            called, theirs = self._called, self.stated / self.stated_ratio
            return tr(
                "{module}: {called} is {own:.6g} by its config, {theirs:.6g} by the reference's",
                module=self.module,
                called=called,
                own=self.stated,
                theirs=theirs,
            )
        if self.candidate.state == "off" or self.reference.state != "off":
            return self._told(self.candidate)
        return tr("{told} in the reference", told=self._told(self.reference))

    @property
    def _called(self) -> str:
        return _CALLED.get((self.kind, self.constant)) or tr("the {constant}", constant=self.constant)

    def _told(self, side: EstimatedConstant) -> str:
        if self.constant == "epsilon":
            size = tr("{ratio:.3g} times what the config states", ratio=1 + side.off)
            if self.stated is not None:
                estimated = (1 + side.off) * self.stated
                size = tr("{found:.2g} in place of {stated:.2g}", found=estimated, stated=self.stated)
            interval = tr("{low:.3g} to {high:.3g} times", low=1 + side.low, high=1 + side.high)
        else:
            size = self._share(_percent(abs(side.off)), too_high=side.off > 0)
            ends = (
                sorted((abs(side.low), abs(side.high))) if side.low * side.high > 0 else (side.low, side.high)
            )
            interval = tr("{low} to {high} %", low=_percent(ends[0]), high=_percent(ends[1]))
        others = [_CALLED.get((self.kind, other), other) for other in side.confused]
        if others:
            interval = tr(
                "{interval}; {others} would explain it as well",
                interval=interval,
                others=listed(others, " or "),
            )
        return tr(
            "{module}: {called} is {size} (interval {interval})",
            module=self.module,
            called=self._called,
            size=size,
            interval=interval,
        )

    def _share(self, percent: str, *, too_high: bool) -> str:
        if self.constant == "bias":
            if too_high:
                return tr("{percent} % of the output's size too high", percent=percent)
            return tr("{percent} % of the output's size too low", percent=percent)
        return (
            tr("{percent} % too high", percent=percent)
            if too_high
            else tr("{percent} % too low", percent=percent)
        )


@dataclass(frozen=True)
class ScoreTests:
    findings: tuple[ConstantDifference, ...]
    """Constants that are different first, then those that are off on both sides, then the others."""
    tested: int
    """Constants of modules that both runs tested."""
    not_resolved: int
    not_tested: dict[str, str]
    unexplained: tuple[str, ...]
    """Modules of the candidate that are further from their definition than rounding and constants explain."""

    @property
    def different(self) -> tuple[ConstantDifference, ...]:
        return tuple(finding for finding in self.findings if finding.different)

    @property
    def words(self) -> str:
        """The finding in one sentence."""
        different = self.different
        if different:
            more = f", and {len(different) - 1} more" if len(different) > 1 else ""
            return different[0].words + more
        known = self.tested - self.not_resolved
        words = f"{known} of {self.tested} constants are as the config states, or off alike in both runs"
        return words + (f"; {self.not_resolved} have no effect to be seen" if self.not_resolved else "")

    def as_json(self) -> dict[str, Any]:
        return {
            "family_wise": FAMILY_WISE,
            "tested": self.tested,
            "not_resolved": self.not_resolved,
            "not_tested": self.not_tested,
            "unexplained": list(self.unexplained),
            "constants": [_as_json(finding) for finding in self.findings],
        }


def score_tests(reference: Path, candidate: Path) -> ScoreTests | None:
    """Score tests of two run directories; None where one of them recorded none."""
    a, b = read_score_tests(reference), read_score_tests(candidate)
    if a is None or b is None:
        return None
    return compared(a, b)


def compared(reference: Record, candidate: Record) -> ScoreTests:
    both = [
        (reference.modules[name], module)
        for name, module in candidate.modules.items()
        if name in reference.modules
    ]
    pairs = [
        (a, b, estimate_a, estimate_b)
        for a, b in both
        for estimate_a in a.constants
        for estimate_b in b.constants
        if estimate_a.constant == estimate_b.constant
    ]
    # Each side's interval and that of their difference.
    tests = 3 * max(1, len(pairs))
    findings = [_finding(*pair, tests) for pair in pairs]
    findings.sort(
        key=lambda finding: (
            not finding.different,
            "off" not in (finding.candidate.state, finding.reference.state),
        )
    )
    missing = {
        name: "not recorded by the other run"
        for name in (*reference.modules, *candidate.modules)
        if name not in reference.modules or name not in candidate.modules
    }
    return ScoreTests(
        tuple(findings),
        len(findings),
        sum("not resolved" in (f.candidate.state, f.reference.state) for f in findings),
        {**missing, **reference.not_tested, **candidate.not_tested},
        tuple(b.module for _, b in both if b.rest > _LARGEST_REST[b.dtype]),
    )


def _finding(
    a: Module, b: Module, estimate_a: Estimate, estimate_b: Estimate, tests: int
) -> ConstantDifference:
    reference, candidate = _side(a, estimate_a, tests), _side(b, estimate_b, tests)
    ratio = estimate_b.stated / estimate_a.stated if estimate_b.stated and estimate_a.stated else 1.0
    difference = (1 + estimate_b.off) * ratio - (1 + estimate_a.off)
    width = math.hypot(_width(a, estimate_a, tests), ratio * _width(b, estimate_b, tests))
    far = _beyond(b if candidate.state == "off" else a, estimate_b, difference, width)
    off = "off" in (reference.state, candidate.state) or ratio != 1
    # What is unexplained or not resolved on the other side may be anything: no statement about a difference.
    known = "unexplained" not in (reference.state, candidate.state)
    return ConstantDifference(
        b.module,
        b.kind,
        estimate_b.constant,
        estimate_b.stated,
        ratio,
        reference,
        candidate,
        difference,
        difference - width,
        difference + width,
        off and far and known,
    )


def _side(module: Module, estimate: Estimate, tests: int) -> EstimatedConstant:
    width = _width(module, estimate, tests)
    state: State
    if module.rest > _LARGEST_REST[module.dtype]:
        state = "unexplained"
    elif _beyond(module, estimate, estimate.off, width):
        state = "off"
    else:
        state = "as stated" if width <= _RESOLVED[estimate.constant] else "not resolved"
    return EstimatedConstant(
        state, estimate.off, estimate.off - width, estimate.off + width, tuple(estimate.confused)
    )


def _width(module: Module, estimate: Estimate, tests: int) -> float:
    """Half of the interval."""
    if estimate.error is None or module.clusters < 2:
        return 1e30  # JSON has no infinity
    return min(1e30, quantile(tests, module.clusters) * estimate.error)


@lru_cache(maxsize=1024)
def quantile(tests: int, clusters: int) -> float:
    """Standard errors that one of so many intervals, each from so many clusters, reaches to each side."""
    from scipy.special import stdtrit  # half a second faster than scipy.stats

    return -float(stdtrit(clusters - 1, FAMILY_WISE / tests / 2))


def _beyond(module: Module, estimate: Estimate, off: float, width: float) -> bool:
    """Whether it is beyond its interval and beyond what is of no consequence."""
    if abs(off) <= width:
        return False
    if estimate.constant == "epsilon":
        return abs(off) > _EPSILON_OFF and abs(off) * estimate.effect > _EPSILON_EFFECT[module.dtype]
    rounded = estimate.constant in ("scale", "base") or module.kind == "rotary"
    floors = _ROUNDED if rounded else _MOVED
    return abs(off) > floors[module.dtype]


def _percent(share: float) -> str:
    return f"{100 * share:.2f}" if abs(share) >= 1e-4 else f"{100 * share:.1e}"


def _as_json(difference: ConstantDifference) -> dict[str, Any]:
    sides = {
        role: {
            "state": side.state,
            "off": side.off,
            "interval": [side.low, side.high],
            "or": list(side.confused),
        }
        for role, side in (("reference", difference.reference), ("candidate", difference.candidate))
    }
    return {
        "module": difference.module,
        "constant": difference.constant,
        "stated": difference.stated,
        **sides,
        "difference": difference.difference,
        "interval": [difference.low, difference.high],
        "different": difference.different,
    }
