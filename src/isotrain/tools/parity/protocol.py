"""The evidence that two runs and their companions have, put together to a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isotrain.errors import DataError
from isotrain.language import tr
from isotrain.recipe.difference import changes
from isotrain.tools.parity.baseline import verdict_against
from isotrain.tools.parity.compare.comparison import (
    HARMLESS,
    PERTURBATION,
    Comparison,
    compare,
    recipe_changes,
)
from isotrain.tools.parity.compare.metric_names import choose
from isotrain.tools.parity.compare.outcome import OtherRuns, Pairing, margins_of, outcome_of, pairing_of
from isotrain.tools.parity.devices import why_untraced
from isotrain.tools.parity.levels.dumps import dump_levels
from isotrain.tools.parity.levels.envelope import envelope_level, followed
from isotrain.tools.parity.levels.layers import layers_level
from isotrain.tools.parity.levels.level import Level, not_run
from isotrain.tools.parity.levels.operators import operators_level
from isotrain.tools.parity.levels.paired import paired_level
from isotrain.tools.parity.read.baseline import is_baseline
from isotrain.tools.parity.read.msprobe_dump import FORMAT as DUMP
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.run import RunLog, section
from isotrain.tools.parity.verdict import Verdict, judge

_FREE_RUNNING = tr("each run sampled its own responses, which part by chance")


@dataclass(frozen=True)
class Companions:
    """Runs besides the two that are compared."""

    reruns: Sequence[Path] = ()
    """Runs of the reference. Where curves are paired, they are its envelope and must only round otherwise."""
    pairs: Sequence[tuple[Path, Path]] = ()
    """Reference and candidate with other seeds."""
    dumps: tuple[Path, Path] | None = None
    """Dumps of msprobe of single steps, the reference's first."""


NO_COMPANIONS = Companions()


def verdict_on(
    reference: Path,
    candidate: Path,
    companions: Companions = NO_COMPANIONS,
    *,
    metrics: Sequence[str] = (),
    margins: Sequence[str] = (),
    allow: Sequence[str] = (),
    free_running: bool = False,
    items: int | None = None,
) -> Verdict:
    """`free_running` says that the runs sampled responses of their own: their curves are not paired.

    `items`: how many rows were validated on.
    """
    if is_baseline(reference):
        if companions != NO_COMPANIONS or items is not None:
            raise DataError("--rerun, --pair, --dump and --items: a baseline has its reruns in it")
        return verdict_against(reference, candidate, metrics, margins, allow, free_running=free_running)
    runs = read_run(reference), read_run(candidate)
    dumps = _dumps(*runs, companions)
    chosen = choose(metrics, *runs)
    comparison = compare(chosen.reference, chosen.candidate, chosen.metrics, allow)
    pairing = pairing_of(chosen.reference, chosen.candidate, free=free_running)
    stated = margins_of(margins, list(comparison.curves))
    reruns = _reruns(comparison, companions.reruns, pairing)
    pairs = [
        (read_run(reference_path), read_run(candidate_path))
        for reference_path, candidate_path in companions.pairs
    ]
    _check_numbers(comparison, [*reruns, *(run for pair in pairs for run in pair)])
    outcome = outcome_of(comparison, pairing, OtherRuns(reruns, pairs), stated, items)
    levels = _levels(comparison, pairing, reruns, stated, dumps)
    return judge(comparison, outcome, levels)


def _dumps(reference: RunLog, candidate: RunLog, companions: Companions) -> tuple[Path, Path] | None:
    """The dumps to compare: those given beside logs, or the two runs themselves."""
    are = [run.format == DUMP for run in (reference, candidate)]
    if not any(are):
        for path in companions.dumps or ():
            if read_run(path).format != DUMP:
                raise DataError(f"--dump {path}: is no dump of msprobe")
        return companions.dumps
    if not all(are):
        raise DataError(
            f"{(reference if are[0] else candidate).path} is a dump of msprobe and the other is not: give "
            "two dumps, or two logs and --dump A B"
        )
    if companions != NO_COMPANIONS:
        raise DataError("--rerun, --pair and --dump are given with logs: two dumps have no curves")
    return reference.path, candidate.path


def _levels(
    comparison: Comparison,
    pairing: Pairing,
    reruns: Sequence[RunLog],
    margins: Mapping[str, float],
    dumps: tuple[Path, Path] | None,
) -> Iterator[Level]:
    reference, candidate = comparison.reference, comparison.candidate
    untraced = why_untraced(reference, candidate)
    if dumps is not None:
        yield from dump_levels(*dumps)
    elif untraced:
        yield not_run("P0", untraced)
    else:
        yield operators_level(reference.path, candidate.path)
    if pairing == "free-running":
        without = ("P2", "P3") if dumps else ("P1", "P2", "P3")
        yield from (not_run(name, _FREE_RUNNING) for name in without)
        return
    if dumps is None and untraced:
        yield not_run("P1", untraced)
    elif dumps is None:
        dtype = str(section(reference.recipe, "model").get("dtype", "bfloat16"))
        # Layers see other inputs where samples are laid out otherwise: such a run says nothing about them.
        noise = [run.path for run in reruns if not _changes(reference, run, f"{PERTURBATION}:")]
        yield layers_level(reference, candidate, noise, dtype=dtype)
    yield paired_level(comparison, reruns)
    if not reruns or comparison.not_numbers:
        yield not_run("P3")
    else:
        yield envelope_level(reference, candidate, reruns, margins)


def _reruns(comparison: Comparison, paths: Sequence[Path], pairing: Pairing) -> list[RunLog]:
    reference = comparison.reference
    if len({path.resolve() for path in (reference.path, *paths)}) <= len(paths):
        raise DataError("--rerun names a run twice, or the reference itself: give further runs")
    return [_rerun(reference, path, pairing) for path in paths]


def _rerun(reference: RunLog, path: Path, pairing: Pairing) -> RunLog:
    """A run that only differs from the reference by rounding or, where responses are sampled, by its seed."""
    rerun = read_run(path)
    free = tuple(name for name in HARMLESS if name != "seed:" or pairing == "free-running")
    other = [line for line in recipe_changes(reference, rerun) if not line.startswith(free)]
    other += [f"data.{k}" for k, v in reference.data.items() if rerun.data.get(k, v) != v]
    if pairing == "paired":
        for metric in followed([reference]):
            there = rerun.metrics.get(metric)
            if there is None or not np.array_equal(there.steps_S, reference.metrics[metric].steps_S):
                other.append(f"'{metric}' is not there at each of the reference's steps")
    if other:
        raise DataError(f"{path}: is no rerun of the reference: {'; '.join(other)}")
    return rerun


def _changes(reference: RunLog, rerun: RunLog, but: str) -> list[str]:
    """How a rerun's device, model and data sections differ, but for one field."""
    changed = [
        f"{name}.{line}"
        for name in ("device", "model", "data")
        for line in changes(section(reference.recipe, name), section(rerun.recipe, name))
    ]
    return [line for line in changed if not line.startswith(but)]


def _check_numbers(comparison: Comparison, runs: Sequence[RunLog]) -> None:
    for run in runs:
        for metric in comparison.curves:
            series = run.metrics.get(metric)
            if series is not None and not np.isfinite(series.values_S).all():
                raise DataError(f"{run.path}: '{metric}' is not a number somewhere; leave this run out")
