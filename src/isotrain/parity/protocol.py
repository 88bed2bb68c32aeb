"""The levels that two runs and their companions have evidence for, put together to a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isotrain.errors import DataError
from isotrain.parity.compare import Comparison, compare
from isotrain.parity.envelope import envelope_level, followed
from isotrain.parity.equivalence import equivalence_level
from isotrain.parity.layers import layers_level
from isotrain.parity.levels import Level, not_run
from isotrain.parity.obstacles import recipe_changes
from isotrain.parity.operators import operators_level
from isotrain.parity.outcome import outcome_level
from isotrain.parity.paired import paired_level, tempered
from isotrain.parity.run import Run, section
from isotrain.parity.sources.read import read_run
from isotrain.parity.verdict import Verdict, judge

_PERTURBATION = "model.perturbation:"
_FREE_RUNNING = "each run sampled its own responses, which part by chance: decided over seeds"


@dataclass(frozen=True)
class Companions:
    """Runs besides the two that are compared."""

    members: Sequence[Path] = ()
    """Of the reference, with harmless changes: its envelope."""
    pairs: Sequence[tuple[Path, Path]] = ()
    """Reference and candidate with other seeds."""


ALONE = Companions()


def verdict_on(
    reference: Path,
    candidate: Path,
    companions: Companions = ALONE,
    *,
    metrics: Sequence[str] = (),
    allow: Sequence[str] = (),
    free_running: bool = False,
) -> Verdict:
    """`free_running` says that the runs sampled responses of their own: their curves are not paired."""
    first, second = read_run(reference), read_run(candidate)
    comparison = compare(first, second, metrics, allow)
    if not comparison.comparable:
        return judge(comparison, ())
    levels = paired_levels(comparison, companions.members, free_running)
    return judge(comparison, [*levels, *seed_levels(comparison, companions.pairs)])


def paired_levels(comparison: Comparison, members: Sequence[Path], free_running: bool) -> Iterator[Level]:
    """P0 to P3: one run against one other."""
    reference, candidate = comparison.reference, comparison.candidate
    yield operators_level(reference.path, candidate.path)
    if free_running:
        yield from (not_run(name, _FREE_RUNNING) for name in ("P1", "P2", "P3"))
        return
    around = _members(reference, members)
    dtype = str(section(reference.recipe, "model").get("dtype", "bfloat16"))
    yield layers_level(reference, candidate, members, dtype=dtype)
    envelope = envelope_level(reference, candidate, around) if members else not_run("P3")
    yield tempered(paired_level(comparison), envelope)
    yield envelope


def seed_levels(comparison: Comparison, pairs: Sequence[tuple[Path, Path]]) -> Iterator[Level]:
    """P4 and P5: over seeds, that of the compared runs among them."""
    if not pairs:
        return
    runs = [(read_run(one), read_run(other)) for one, other in pairs]
    everything = [(comparison.reference, comparison.candidate), *runs]
    yield equivalence_level(everything)
    yield outcome_level(everything)


def _members(reference: Run, paths: Sequence[Path]) -> list[Run]:
    if len({path.resolve() for path in (reference.path, *paths)}) <= len(paths):
        raise DataError(
            "the envelope names a run twice, or the reference itself: its members are further runs"
        )
    return [_member(reference, path) for path in paths]


def _member(reference: Run, path: Path) -> Run:
    """A run that may only differ from the reference in the last digits that it began with."""
    member = read_run(path)
    other = [line for line in recipe_changes(reference, member) if not line.startswith(_PERTURBATION)]
    other += [f"data.{k}" for k, v in reference.data.items() if member.data.get(k, v) != v]
    for metric in followed([reference]):
        there = member.metrics.get(metric)
        if there is None or not np.array_equal(there.steps_S, reference.metrics[metric].steps_S):
            other.append(f"'{metric}' is not there at each of the reference's steps")
    if other:
        raise DataError(f"{path}: is no member of the reference's envelope: {'; '.join(other)}")
    return member
