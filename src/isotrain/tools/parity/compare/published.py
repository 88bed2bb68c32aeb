"""Rules by which others have called two runs the same, under their own names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from isotrain.language import tr
from isotrain.tools.parity.compare.statistics import Apart

Kind = Literal["loss", "reward"]

_KINDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("reward", re.compile(r"(^|/)(critic/rewards/mean|rewards?(_mean|/mean)?|critic/score/mean|return)$")),
    ("loss", re.compile(r"(^|[/_])(pg_)?loss(_mean|/mean)?$")),
)
# Parts of a loss that no published rule is about.
_PARTS = ("kl_loss", "entropy_loss", "aux_loss")


def kind_of(metric: str) -> Kind | None:
    """Whether a metric is a loss or a reward by its name; others have no published rule."""
    if metric.startswith("timing") or metric.endswith(_PARTS):  # `timing_s/reward` is how long it took
        return None
    return next((kind for kind, pattern in _KINDS if pattern.search(metric)), None)


@dataclass(frozen=True)
class Rule:
    name: str
    kinds: tuple[Kind, ...]
    statistic: Callable[[Apart], float | None]
    limit: float
    unit: str
    relative: bool = False


@dataclass(frozen=True)
class RuleResult:
    rule: str
    metric: str
    value: float
    limit: float
    unit: str
    relative: bool
    """Relative errors of a curve around 0, such as a policy loss, are told and decide nothing."""

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


def _percent_absolute(apart: Apart) -> float:
    """They write `%` for hundredths of the metric's own unit: 2 % are 0.02, whatever the loss is."""
    return 100 * apart.mean_absolute


def _percent_relative(apart: Apart) -> float | None:
    return None if apart.mean_relative is None else 100 * apart.mean_relative


RULES = (
    Rule(tr("verl: loss, mean absolute error"), ("loss",), _percent_absolute, 2.0, tr("hundredths")),
    Rule(tr("verl: reward, mean absolute error"), ("reward",), _percent_absolute, 4.0, tr("hundredths")),
    Rule(tr("OpenRLHF: mean absolute error"), ("loss", "reward"), _percent_absolute, 2.0, tr("hundredths")),
    Rule(
        tr("accuracy guide: mean relative error"),
        ("loss",),
        _percent_relative,
        1.0,
        tr("% of the value"),
        True,
    ),
)


def rule_results(metric: str, apart: Apart) -> Iterator[RuleResult]:
    """Results of the published rules for a metric; nothing where they are not about it, or not defined."""
    for rule in RULES:
        value = rule.statistic(apart) if kind_of(metric) in rule.kinds else None
        if value is not None:
            yield RuleResult(rule.name, metric, value, rule.limit, rule.unit, rule.relative)
