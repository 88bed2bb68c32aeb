"""A reference for nightly jobs: several reruns in one small file, and a run judged against it.

A nightly job compares hundreds of times with one file. How often it may be wrong is designed over all of
these nights, and what few reruns do not know of their spread is in each interval.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from isotrain import __version__
from isotrain.errors import DataError
from isotrain.language import tr
from isotrain.tools.parity import thresholds
from isotrain.tools.parity.compare.comparison import HARMLESS, Comparison, compare, recipe_changes
from isotrain.tools.parity.compare.effects import reruns_of, values_of
from isotrain.tools.parity.compare.metric_names import choose
from isotrain.tools.parity.compare.objections import Objection, ended_early, watched_kind
from isotrain.tools.parity.compare.outcome import (
    Baseline,
    OtherRuns,
    is_score,
    last_validations,
    margins_of,
    outcome_of,
    pairing_of,
)
from isotrain.tools.parity.compare.published import kind_of
from isotrain.tools.parity.levels.level import LEVELS, not_run
from isotrain.tools.parity.read.baseline import (
    MAX_BYTES,
    MOST_METRICS,
    MOST_RUNS,
    BaselineFile,
    BlockCurve,
    Rerun,
    block_values,
    blocks_of,
    is_baseline,
    read_baseline,
    write_baseline,
)
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.run import RunLog, common
from isotrain.tools.parity.verdict import Verdict, judge

_ONLY_CURVES = tr("a baseline has nothing but curves")
# Of a log without a few lines, the rest can be judged.
_MOST_GAPS = 0.1
_UNRELATED = ("time", "command", "data")


@dataclass(frozen=True)
class Reach:
    """What tonight's run can be called by one metric."""

    metric: str
    margin: float
    equivalent: float
    """Up to this difference it is equivalent; negative if the reruns are too few, or too far apart."""
    different: float
    """Beyond this difference it is different."""

    @property
    def is_enough(self) -> bool:
        return self.equivalent >= 0

    @property
    def words(self) -> str:
        if not self.is_enough:
            return tr(
                "{metric}: never equivalent within {margin:g}: give more reruns or a wider margin; different "
                "beyond {different:.2g}",
                metric=self.metric,
                margin=self.margin,
                different=self.different,
            )
        return tr(
            "{metric}: equivalent up to a difference of {equivalent:.2g}, different beyond {different:.2g}",
            metric=self.metric,
            equivalent=self.equivalent,
            different=self.different,
        )


def make_baseline(
    paths: Sequence[Path], out: Path, margins: Sequence[str], nights: int, false_alarms: float
) -> tuple[int, list[Reach]]:
    """Write a baseline. Returns its size and what it can show, the deciding metrics alone."""
    if not thresholds.FEWEST_RUNS <= len(paths) <= MOST_RUNS:
        raise DataError(
            f"{len(paths)} runs: give {thresholds.FEWEST_RUNS} to {MOST_RUNS} reruns, better ten or more"
        )
    # What is shown are intervals of this confidence, and none that is narrower decides.
    most = (1 - thresholds.CONFIDENCE) * nights
    if not 0 < false_alarms <= most:
        raise DataError(
            f"--false-alarms {false_alarms:g}: more than 0 and at most {most:g}, of {nights} nights"
        )
    if out.exists() and not is_baseline(out):
        raise DataError(f"{out}: exists and is no baseline; choose another name")
    runs = [read_run(path) for path in paths]
    deciding, others = _metrics(runs)
    _check_reruns(runs, deciding)
    first = runs[0]
    kept, left_out = _usable(runs, [*deciding, *others])
    environment = first.environment and {k: v for k, v in first.environment.items() if k not in _UNRELATED}
    file = BaselineFile(
        format="isotrain parity baseline",
        version=1,
        isotrain=__version__,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        nights=nights,
        false_alarms=false_alarms,
        margins=margins_of(margins, [*deciding, *filter(is_score, others)]),
        runs=[Rerun(str(run.path), run.format, run.sha256) for run in runs],
        recipe=first.recipe,
        settings=first.settings,
        environment=environment or None,
        planned_steps=first.planned_steps,
        data=first.data,
        left_out=left_out,
        curves={metric: _curve(metric, runs, len(kept)) for metric in kept},
    )
    size = write_baseline(out, file)
    if size > MAX_BYTES:
        out.unlink()
        raise DataError(f"{out}: would be larger than {MAX_BYTES:,} bytes; its configurations are too long")
    return size, list(_reach(file, out))


def _metrics(runs: Sequence[RunLog]) -> tuple[list[str], list[str]]:
    """Losses and rewards of all reruns; scores, and what `compare` watches."""
    shared = [name for name in runs[0].metrics if all(name in run.metrics for run in runs)]
    deciding = [name for name in shared if kind_of(name)]
    if not deciding:
        raise DataError(f"{runs[0].path} and its reruns have no loss or reward in common")
    scores = [name for name in shared if is_score(name)]
    watched = [name for name in shared if watched_kind(name)]
    others = [name for name in dict.fromkeys([*scores, *watched]) if name not in deciding]
    return deciding[:MOST_METRICS], others[: MOST_METRICS - min(len(deciding), MOST_METRICS)]


def _check_reruns(runs: Sequence[RunLog], deciding: Sequence[str]) -> None:
    """Whole runs of one recipe that are no copies of each other."""
    first = runs[0]
    contents: dict[tuple[bytes, ...], Path] = {}
    for run in runs:
        other = [line for line in recipe_changes(first, run) if not line.startswith(HARMLESS)]
        other += [f"data.{name}" for name, digest in first.data.items() if run.data.get(name) != digest]
        if (first.configuration is None) != (run.configuration is None):
            other.append("one of them says nothing about its recipe")
        if other:
            raise DataError(f"{run.path}: is no rerun of {first.path}: {'; '.join(other)}")
        for metric in deciding:
            if not np.isfinite(run.metrics[metric].values_S).all():
                raise DataError(f"{run.path}: '{metric}' is not a number somewhere; leave this run out")
        for early in ended_early(first, run, deciding):
            raise DataError(f"{run.path} and {first.path}: {early.words}; give whole runs")
        content = tuple(run.metrics[metric].values_S.tobytes() for metric in deciding)
        if content in contents:
            raise DataError(
                f"{run.path} and {contents[content]} are equal in every value: give reruns with other seeds, "
                "so that the baseline knows how far runs are apart"
            )
        contents[content] = run.path


def _usable(runs: Sequence[RunLog], metrics: Sequence[str]) -> tuple[list[str], list[str]]:
    """Metrics that are numbers in all runs at some common steps, and the others."""
    kept: list[str] = []
    left_out: list[str] = []
    for metric in metrics:
        steps_S, values = common([run.metrics[metric] for run in runs])
        (kept if len(steps_S) and np.isfinite(values).all() else left_out).append(metric)
    return kept, left_out


def _curve(metric: str, runs: Sequence[RunLog], metrics: int) -> BlockCurve:
    steps_S, _ = common([run.metrics[metric] for run in runs])
    ends, records = blocks_of(steps_S, metrics, len(runs))
    curve = BlockCurve(int(steps_S[0]), ends, records, [])
    return replace(curve, values=[block_values(curve, run.metrics[metric]) for run in runs])


def _reach(file: BaselineFile, path: Path) -> Iterator[Reach]:
    reruns = file.reruns(path, {})
    free = pairing_of(reruns[0], reruns[1]) == "free-running"
    kinds = {metric: kind_of(metric) for metric in file.curves}
    deciding = [metric for metric, kind in kinds.items() if kind or is_score(metric)]
    alarm = Baseline(reruns, file.nights, file.false_alarms).alarm(len(deciding))
    for metric in deciding:
        if free and kinds[metric] == "loss" and "reward" in kinds.values() and metric not in file.margins:
            continue
        margin = file.margins.get(metric, thresholds.MARGINS[kinds[metric] or "score"])
        values = values_of(metric, reruns)
        if kinds[metric] is None:
            values = list(map(last_validations, values))
        yield Reach(metric, margin, *reruns_of(values).reach(margin, alarm))


def verdict_against(
    path: Path,
    candidate: Path,
    metrics: Sequence[str] = (),
    margins: Sequence[str] = (),
    allow: Sequence[str] = (),
    *,
    free_running: bool = False,
) -> Verdict:
    """One run against the reruns in a baseline: their spread alone tells how far a rerun may be."""
    file, sha256 = read_baseline(path)
    chosen = choose(metrics, file.mean(path, sha256), read_run(candidate))
    reference, run = chosen.reference, chosen.candidate
    averaged = {
        name: means
        for name, curve in file.curves.items()
        if name in run.metrics and len(means := curve.block_means(run.metrics[name]))
    }
    comparison = compare(_with_seed_of(reference, run), replace(run, metrics=averaged), chosen.metrics, allow)
    # Blocks hide where a run ends.
    kept = [one for one in comparison.objections if one.name != "steps"]
    against = [one for one in _objections(file, comparison, run) if one.name not in allow]
    comparison = replace(comparison, objections=(*against, *kept))
    pairing = pairing_of(reference, comparison.candidate, free=free_running)
    named = [*comparison.curves, *(name for name in averaged if is_score(name))]
    stated = {**file.margins, **margins_of(margins, named)}
    reruns = Baseline(file.reruns(path, sha256), file.nights, file.false_alarms)
    outcome = outcome_of(comparison, pairing, OtherRuns(baseline=reruns), stated)
    return judge(comparison, outcome, [not_run(name, _ONLY_CURVES) for name in LEVELS])


def _with_seed_of(reference: RunLog, run: RunLog) -> RunLog:
    """Another seed is another rerun."""
    seed = (run.configuration or {}).get("seed")

    def seeded(recipe: dict[str, object] | None) -> dict[str, object] | None:
        return {**recipe, "seed": seed} if recipe is not None and seed is not None else recipe

    return replace(reference, recipe=seeded(reference.recipe), settings=seeded(reference.settings))


def _objections(file: BaselineFile, comparison: Comparison, run: RunLog) -> Iterator[Objection]:
    """Why nobody should call a night green, whatever its curves say."""
    for difference in comparison.differences:
        yield Objection(difference.name, tr("its inputs are not those of the baseline"))
    if comparison.reference.configuration is not None and run.configuration is None:
        yield Objection("recipe", tr("the candidate does not say its recipe, as the baseline does"))
    if missing := [metric for metric in file.curves if metric not in run.metrics]:
        words = tr("the candidate lacks metrics of the baseline: {metrics}", metrics=", ".join(missing))
        yield Objection("metrics", words)
    there = [metric for metric in comparison.curves if metric in file.curves]
    ends = {metric: file.curves[metric].end() for metric in there}
    early = list(ended_early(replace(comparison.reference, metrics=ends), run, there))
    yield from early
    for metric, curve in file.curves.items():
        series = comparison.candidate.metrics.get(metric)
        if metric not in run.metrics or early:
            continue
        have = 0 if series is None else len(series)
        # A few lines may be lost, the last may not.
        gaps = have < (1 - _MOST_GAPS) * len(curve.ends)
        if series is None or gaps or series.steps_S[-1] != curve.ends[-1]:
            words = tr(
                "the candidate has {have:,} of {count:,} points of {metric}",
                metric=metric,
                have=have,
                count=len(curve.ends),
            )
            yield Objection("steps", words)
        elif is_score(metric) and not np.isfinite(series.values_S).all():
            yield Objection("validation", tr("{metric} of the candidate is not a number", metric=metric))
