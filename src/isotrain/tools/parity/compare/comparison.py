"""Two runs side by side: inputs that differ, and every statistic of the curves they share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from isotrain.errors import DataError
from isotrain.language import listed, tr
from isotrain.recipe.difference import MAY_DIFFER_IN_PARITY, changes, not_free, version_changes
from isotrain.tools.parity.compare.objections import OBJECTIONS, SPEED, Objection, ended_early, looks_wrong
from isotrain.tools.parity.compare.published import RuleResult, kind_of, rule_results
from isotrain.tools.parity.compare.statistics import Apart, Throughput, apart, throughput
from isotrain.tools.parity.run import BASELINE, ROLES, Numbers, RunLog, common, section

_FREE_ENVIRONMENT = ("time", "command")
ALLOWED = ("recipe", "data", *OBJECTIONS)
PERTURBATION = "model.perturbation"
SPLIT = "data.tokens_per_micro_batch"
# What a rerun may differ in besides execution: none of it is meant to change the training.
HARMLESS = (f"{PERTURBATION}:", f"{SPLIT}:", "seed:")
# How samples are put into micro-batches: frameworks count them in tokens or in rows.
_LEFT_TO_FRAMEWORKS = (SPLIT,)
_LONGEST_VALUE = 80
_CACHED = re.compile(r"models--[^/]*?--([^/]+)/snapshots/")

# The published ratio is over the first steps; the first of them also compile and warm up.
FIRST_STEPS, WARM_UP = 4, 4


@dataclass(frozen=True)
class InputDifference:
    name: str
    message: str


def differences(reference: RunLog, candidate: RunLog) -> Iterator[InputDifference]:
    """Everything that makes it another training before a step was computed."""
    yield from _recipes(reference, candidate)
    yield from _data(reference, candidate)


def recipe_changes(reference: RunLog, candidate: RunLog) -> list[str]:
    """Fields that make it another training: `optimizer.lr: 1e-05 -> 0.0001`."""
    if reference.recipe is not None and candidate.recipe is not None:
        changed = version_changes(reference.recipe, candidate.recipe)
        return not_free(changed, {*MAY_DIFFER_IN_PARITY, *_same_content(reference, candidate)})
    a, b = reference.configuration, candidate.configuration
    if a is None or b is None:
        return []
    # A log does not say what is in its files: they may be the same if both have one name.
    a, b = ({**_by_name(recipe), "verl": recipe.get("verl", {})} for recipe in (a, b))
    return not_free(version_changes(a, b), {*MAY_DIFFER_IN_PARITY, *_LEFT_TO_FRAMEWORKS})


def _by_name(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe whose files and models are told by their names, wherever a machine has them."""
    renamed = {}
    for name, value in recipe.items():
        if isinstance(value, dict):
            value = _by_name(value)
        elif name == "path" and isinstance(value, str):
            value = _model_name(value)
        elif name in ("train", "validation"):
            paths = value if isinstance(value, list) else [value]
            value = ["/".join(path.split("/")[-2:]) for path in paths if isinstance(path, str)]
        renamed[name] = value
    return renamed


def _model_name(path: str) -> str:
    """`Qwen2-7B` of `/models/Qwen2-7B` and of the Hub's cache, `models--Qwen--Qwen2-7B/snapshots/f2826a`."""
    cached = _CACHED.search(path)
    return cached[1] if cached else path.rstrip("/").rpartition("/")[2]


def _same_content(reference: RunLog, candidate: RunLog) -> Iterator[str]:
    """Paths that may differ, because what is there has the same digest."""
    for name, digest in reference.data.items():
        if candidate.data.get(name) == digest:
            yield f"data.{name}" if name in ("train", "validation") else f"{name}.path"


def environment_changes(reference: RunLog, candidate: RunLog) -> list[str]:
    """Device, versions and variables that differ: what a difference may come from."""
    if reference.environment is None or candidate.environment is None:
        return []
    return not_free(changes(reference.environment, candidate.environment), _FREE_ENVIRONMENT)


def _recipes(reference: RunLog, candidate: RunLog) -> Iterator[InputDifference]:
    changed = recipe_changes(reference, candidate)
    if not changed:
        return
    # A section that one side lacks is a whole dictionary; verdict.json has all of it.
    shown = [" -> ".join(_shortened(side) for side in line.split(" -> ")) for line in changed]
    words = listed(shown, "; ")
    if reference.recipe is None or candidate.recipe is None:
        yield InputDifference("recipe", tr("the printed configurations differ: {changes}", changes=words))
    else:
        yield InputDifference("recipe", tr("the recipes differ: {changes}", changes=words))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."


def _data(reference: RunLog, candidate: RunLog) -> Iterator[InputDifference]:
    differ = [name for name, digest in reference.data.items() if candidate.data.get(name, digest) != digest]
    if differ:
        yield InputDifference(
            "data", tr("they were not trained on the same rows: {names}", names=", ".join(differ))
        )


@dataclass(frozen=True)
class Aligned:
    """One metric of both runs at the steps that both have, up to the first value that is not a number."""

    steps_S: npt.NDArray[np.int64]
    reference_S: Numbers
    candidate_S: Numbers
    of_reference: int
    of_candidate: int
    """How many steps each run recorded."""

    @property
    def whole(self) -> bool:
        return len(self.steps_S) == self.of_reference == self.of_candidate


@dataclass(frozen=True)
class NotANumber:
    """Where a metric stops being a number."""

    metric: str
    reference_step: int | None
    candidate_step: int | None

    @property
    def one_sided(self) -> bool:
        return self.reference_step is None or self.candidate_step is None

    @property
    def words(self) -> str:
        if self.reference_step is not None and self.candidate_step is not None:
            return tr(
                "{metric} is not a number in both runs, from step {step}",
                metric=self.metric,
                step=self.reference_step,
            )
        role, step = "reference", self.reference_step
        if self.candidate_step is not None:
            role, step = "candidate", self.candidate_step
        return tr(
            "{metric} of the {role} is not a number from step {step} on",
            metric=self.metric,
            role=ROLES[role],
            step=step,
        )


@dataclass(frozen=True)
class Comparison:
    reference: RunLog
    candidate: RunLog
    aligned: dict[str, Aligned]
    curves: dict[str, Apart]
    rule_results: tuple[RuleResult, ...]
    """Results of the published rules."""
    speed: dict[str, Throughput]
    """Throughput of the first steps, and without the warm-up."""
    not_numbers: tuple[NotANumber, ...]
    differences: tuple[InputDifference, ...]
    """Recipe or data that differ, and that nobody allowed: it is another computation by what went into it."""
    allowed: tuple[InputDifference, ...]
    objections: tuple[Objection, ...] = ()
    """Why it is not called equivalent even where losses and rewards are within the margin."""
    intended: frozenset[str] = frozenset()
    """Names of `ALLOWED` that somebody allowed."""

    @property
    def broken(self) -> list[RuleResult]:
        """Published rules on absolute errors, the 2 % and 4 %, that do not hold."""
        return [
            rule_result
            for rule_result in self.rule_results
            if not rule_result.passed and not rule_result.relative
        ]

    @property
    def replays(self) -> bool:
        """Whether one run trained on the responses of the other, and earned none of its rewards."""
        return _replays(self.reference) or _replays(self.candidate)

    @property
    def against_baseline(self) -> bool:
        """Whether the reference is a file of several reruns' curves."""
        return self.reference.format == BASELINE

    @property
    def has_curves(self) -> bool:
        """Dumps of single steps have none."""
        return bool(self.reference.metrics or self.candidate.metrics)

    def as_json(self) -> dict[str, Any]:
        return {
            "reference": _described(self.reference),
            "candidate": _described(self.candidate),
            "steps": {
                metric: {
                    "compared": len(curve.steps_S),
                    "reference": curve.of_reference,
                    "candidate": curve.of_candidate,
                }
                for metric, curve in self.aligned.items()
            },
            "not_numbers": [{**asdict(value), "words": value.words} for value in self.not_numbers],
            "differences": [asdict(difference) for difference in self.differences],
            "allowed": [asdict(difference) for difference in self.allowed],
            "objections": [asdict(objection) for objection in self.objections],
            "recipe": recipe_changes(self.reference, self.candidate),
            "environment": environment_changes(self.reference, self.candidate),
            "curves": {metric: asdict(curve) for metric, curve in self.curves.items()},
            "published_rules": [
                {**asdict(rule_result), "passed": rule_result.passed} for rule_result in self.rule_results
            ],
            "throughput": {name: asdict(ratio) for name, ratio in self.speed.items()},
        }


def compare(
    reference: RunLog, candidate: RunLog, metrics: Sequence[str] = (), allow: Sequence[str] = ()
) -> Comparison:
    """`metrics` are those to compare, by default all losses and rewards that both have."""
    unknown = sorted(set(allow) - set(ALLOWED))
    if unknown:
        raise DataError(f"--allow {', '.join(unknown)}: what can be allowed is {', '.join(ALLOWED)}")
    chosen = list(metrics) or default_metrics(reference, candidate)
    if not chosen and (reference.metrics or candidate.metrics):
        raise DataError(
            f"{reference.path} and {candidate.path} have no loss or reward in common; name one with --metric"
        )
    input_differences = list(differences(reference, candidate))
    not_numbers = [value for metric in chosen if (value := _not_a_number(metric, reference, candidate))]
    aligned = {metric: align(metric, reference, candidate) for metric in chosen}
    curves = {
        metric: apart(curve.steps_S, curve.reference_S, curve.candidate_S)
        for metric, curve in aligned.items()
        if len(curve.steps_S)
    }
    if chosen and not curves and not not_numbers:
        raise DataError(f"'{chosen[0]}' has no step in both runs: {reference.path} and {candidate.path}")
    objections = [
        objection
        for objection in (
            *ended_early(reference, candidate, list(curves)),
            *looks_wrong(reference, candidate),
        )
        if objection.name not in allow
    ]
    return Comparison(
        reference,
        candidate,
        {metric: aligned[metric] for metric in curves},
        curves,
        tuple(result for metric, curve in curves.items() for result in rule_results(metric, curve)),
        _speed(reference, candidate),
        tuple(not_numbers),
        tuple(difference for difference in input_differences if difference.name not in allow),
        tuple(difference for difference in input_differences if difference.name in allow),
        tuple(objections),
        frozenset(allow),
    )


def default_metrics(reference: RunLog, candidate: RunLog) -> list[str]:
    """Losses and rewards of both; a run may have some of its own, such as validation at other steps."""
    return [name for name in reference.metrics if name in candidate.metrics and kind_of(name)]


def _not_a_number(metric: str, reference: RunLog, candidate: RunLog) -> NotANumber | None:
    starts = []
    for run in (reference, candidate):
        if metric not in run.metrics:
            raise DataError(f"{run.path} has no '{metric}'")
        series = run.metrics[metric]
        bad_S = series.steps_S[~np.isfinite(series.values_S)]
        starts.append(int(bad_S[0]) if len(bad_S) else None)
    return None if starts == [None, None] else NotANumber(metric, *starts)


def align(metric: str, reference: RunLog, candidate: RunLog) -> Aligned:
    a, b = reference.metrics[metric], candidate.metrics[metric]
    steps_S, (reference_S, candidate_S) = common([a, b])
    bad_S = ~(np.isfinite(reference_S) & np.isfinite(candidate_S))
    end = int(np.argmax(bad_S)) if bad_S.any() else len(steps_S)
    return Aligned(steps_S[:end], reference_S[:end], candidate_S[:end], len(a), len(b))


def _speed(reference: RunLog, candidate: RunLog) -> dict[str, Throughput]:
    name = next((n for n in SPEED if n in reference.metrics and n in candidate.metrics), None)
    if name is None or _replays(reference) != _replays(candidate):
        return {}
    a, b = reference.metrics[name].values_S, candidate.metrics[name].values_S
    parts: dict[str, tuple[Numbers, Numbers]] = {
        tr("first {count} steps", count=FIRST_STEPS): (a[:FIRST_STEPS], b[:FIRST_STEPS]),
        tr("without the first {count} steps", count=WARM_UP): (a[WARM_UP:], b[WARM_UP:]),
    }
    return {
        what: throughput(a, b)
        for what, (a, b) in parts.items()
        if len(a) and len(b) and (a > 0).all() and (b > 0).all()
    }


def _replays(run: RunLog) -> bool:
    """Whether a run trained on another's responses: it took no time to sample them."""
    return section(run.recipe, "rollout").get("replay") is not None


def _described(run: RunLog) -> dict[str, Any]:
    return {"path": str(run.path), "format": run.format, "notes": list(run.notes), "sha256": run.sha256}
