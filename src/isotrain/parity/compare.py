"""Two runs side by side: every statistic of the curves they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from isotrain.errors import DataError
from isotrain.parity.obstacles import ALLOWED, Obstacle, environment_changes, obstacles, recipe_changes
from isotrain.parity.published import Outcome, kind_of, outcomes
from isotrain.parity.run import Numbers, Run, common, section
from isotrain.parity.statistics import Apart, Throughput, apart, throughput

# The published ratio is over the first steps; the first of them also compile and warm up.
FIRST_STEPS, WARM_UP = 4, 4
SPEED = ("perf/throughput", "throughput", "tokens_per_second")


@dataclass(frozen=True)
class Comparison:
    reference: Run
    candidate: Run
    curves: dict[str, Apart]
    outcomes: tuple[Outcome, ...]
    speed: dict[str, Throughput]
    """Of the first steps, and without the warm-up."""
    obstacles: tuple[Obstacle, ...]
    """That were not allowed: with any of them, the figures are not those of the same training."""
    allowed: tuple[Obstacle, ...]

    @property
    def comparable(self) -> bool:
        return not self.obstacles

    @property
    def broken(self) -> list[Outcome]:
        """Published rules on absolute errors, the 2 % and 4 %, that do not hold."""
        return [one for one in self.outcomes if not one.passed and not one.relative]

    def as_json(self) -> dict[str, Any]:
        return {
            "reference": _described(self.reference),
            "candidate": _described(self.candidate),
            "comparable": self.comparable,
            "obstacles": [asdict(obstacle) for obstacle in self.obstacles],
            "allowed": [asdict(obstacle) for obstacle in self.allowed],
            "recipe": recipe_changes(self.reference, self.candidate),
            "environment": environment_changes(self.reference, self.candidate),
            "curves": {metric: asdict(found) for metric, found in self.curves.items()},
            "published_rules": [{**asdict(one), "passed": one.passed} for one in self.outcomes],
            "throughput": {name: asdict(ratio) for name, ratio in self.speed.items()},
        }


def compare(
    reference: Run, candidate: Run, metrics: Sequence[str] = (), allow: Sequence[str] = ()
) -> Comparison:
    """`metrics` are those to compare, by default all losses and rewards that both have."""
    unknown = sorted(set(allow) - set(ALLOWED))
    if unknown:
        raise DataError(f"--allow {', '.join(unknown)}: what can be allowed is {', '.join(ALLOWED)}")
    chosen = list(metrics) or default_metrics(reference, candidate)
    if not chosen:
        raise DataError(
            f"{reference.path} and {candidate.path} have no loss or reward in common; name one with --metric"
        )
    found = list(obstacles(reference, candidate, chosen))
    broken = {"nan", "no-common-steps"} & {obstacle.name for obstacle in found}
    compared = [] if broken else [m for m in chosen if _both(m, reference, candidate)]
    curves = {metric: _apart(metric, reference, candidate) for metric in compared}
    return Comparison(
        reference,
        candidate,
        curves,
        tuple(outcome for metric, one in curves.items() for outcome in outcomes(metric, one)),
        {} if broken else _speed(reference, candidate),
        tuple(obstacle for obstacle in found if obstacle.name not in allow),
        tuple(obstacle for obstacle in found if obstacle.name in allow),
    )


def default_metrics(reference: Run, candidate: Run) -> list[str]:
    """Losses and rewards of both; a run may have some of its own, such as validation at other steps."""
    return [name for name in reference.metrics if name in candidate.metrics and kind_of(name)]


def _both(metric: str, reference: Run, candidate: Run) -> bool:
    return metric in reference.metrics and metric in candidate.metrics


def _apart(metric: str, reference: Run, candidate: Run) -> Apart:
    steps_S, (reference_S, candidate_S) = common([reference.metrics[metric], candidate.metrics[metric]])
    return apart(steps_S, reference_S, candidate_S)


def _speed(reference: Run, candidate: Run) -> dict[str, Throughput]:
    name = next((name for name in SPEED if _both(name, reference, candidate)), None)
    if name is None or _replays(reference) != _replays(candidate):
        return {}
    a, b = reference.metrics[name].values_S, candidate.metrics[name].values_S
    parts: dict[str, tuple[Numbers, Numbers]] = {
        f"first {FIRST_STEPS} steps": (a[:FIRST_STEPS], b[:FIRST_STEPS]),
        f"without the first {WARM_UP} steps": (a[WARM_UP:], b[WARM_UP:]),
    }
    return {
        what: throughput(one, other)
        for what, (one, other) in parts.items()
        if len(one) and len(other) and (one > 0).all() and (other > 0).all()
    }


def _replays(run: Run) -> bool:
    """Whether a run trained on another's responses: it took no time to sample them."""
    return section(run.recipe, "rollout").get("replay") is not None


def _described(run: Run) -> dict[str, Any]:
    return {"path": str(run.path), "format": run.format, "sha256": run.sha256}
