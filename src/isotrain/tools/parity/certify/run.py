"""`parity certify`: runs on two devices level by level, until one fails or time is up.

Each run is a process of its own, under the variables of the device that it is to use.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from isotrain.children import module_command
from isotrain.errors import LaunchError, RecipeError
from isotrain.observe.run_directory import write_atomically
from isotrain.recipe.load import other_run, path_override
from isotrain.recipe.preference import DpoSection, RmSection
from isotrain.recipe.schema import Recipe
from isotrain.tools.parity.compare.comparison import PERTURBATION, SPLIT
from isotrain.tools.parity.levels.layers import TRUTH
from isotrain.tools.parity.levels.routes import first_apart
from isotrain.tools.parity.protocol import Companions, verdict_on
from isotrain.tools.parity.read.layer_trace import read_layer_trace
from isotrain.tools.parity.thresholds import FEWEST_MEMBERS, FEWEST_RUNS
from isotrain.tools.parity.verdict import Verdict, is_right

MOST_MEMBERS, MOST_SEEDS = 8, 10
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}

# Enough to cut the usual batch in several micro-batches.
_PARTS = 16
_LAST_WORDS = 12
# Enough to see rounding grow from one update to the next.
_STEPS = "observe.layer_trace=3"
TRACED = (_STEPS, "observe.operators=true")
"""Settings with which a run's layers and operators can be compared."""
UNTRACED = ("observe.layer_trace=0", "observe.operators=false", "observe.model_digest=true")
"""Settings with which its curves can be certified, where a mesh divides its layers over ranks."""


def seconds_of(text: str) -> float:
    """`90s`, `30m` or `2h`."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if matched is None:
        raise RecipeError(f"--budget {text!r}: write a number with s, m or h, such as 30m")
    return float(matched.group(1)) * _UNITS[matched.group(2)]


@dataclass(frozen=True)
class Plan:
    members: int
    """Runs of the reference for its envelope; 0 where there is no time for one."""
    seeds: int
    """Further pairs of runs; 0 likewise."""
    seconds: float
    by_truth: bool = False
    """Whether operators and the step were right against float64, so that no envelope is needed."""

    def words(self) -> list[str]:
        """The runs to come, and what they can show."""
        lines = []
        if self.members:
            blur = 1 / math.sqrt(2 * self.members)
            lines.append(f"P3: {self.members} members; the envelope's width is known to {100 * blur:.0f} %")
        elif self.by_truth:
            lines.append("P3: not needed; operators and the step are right against float64")
        else:
            lines.append("P3: no envelope; curves alone can rarely show that a computation is the same")
        if self.seeds:
            # The pair that is compared counts as well.
            lines.append(f"outcome: over {self.seeds + 1} seeds, with their spread")
        else:
            lines.append("outcome: one run a side, without the spread between seeds")
        return lines


def plan(left: float, reference_seconds: float, candidate_seconds: float, *, envelope: bool = True) -> Plan:
    """The envelope first: it decides about single runs, with a quarter of the runs that seeds take."""
    members = min(MOST_MEMBERS, int(left / reference_seconds)) if envelope else 0
    if members < FEWEST_MEMBERS:
        members = 0
    left -= members * reference_seconds
    pair = reference_seconds + candidate_seconds
    seeds = min(MOST_SEEDS, int(left / pair))
    if seeds + 1 < FEWEST_RUNS:
        seeds = 0
    return Plan(members, seeds, members * reference_seconds + seeds * pair)


def member_settings(recipe: Recipe, count: int, *, ranks: bool) -> list[tuple[str, ...]]:
    """Changes to the recipe for each of so many members.

    Each starts from weights of other last digits; in turn they also compute attention otherwise, sum over
    other micro-batches and, with `ranks`, over two ranks.
    """
    data = recipe.data
    longest = data.max_length * (2 if isinstance(recipe.algorithm, DpoSection | RmSection) else 1)
    smaller = max(longest, data.tokens_per_micro_batch // _PARTS)
    split = (f"{SPLIT}={smaller}",) if smaller < data.tokens_per_micro_batch else ()
    other = "sdpa" if recipe.model.attention == "padded" else "padded"
    attention = (f"model.attention={other}",)
    if recipe.device.mesh.context > 1:  # which cannot be padded
        attention = ("device.mesh.context_attention=ring",)
    two_ranks = ("device.ranks=2",) if ranks and recipe.device.ranks == 1 else ()
    ways = cycle([(), attention, split, (*attention, *split, *two_ranks)])
    return [(f"{PERTURBATION}={number}", *way) for number, way in enumerate(islice(ways, count), start=1)]


@dataclass(frozen=True)
class TrainedSide:
    """One of the two ways to compute that are compared."""

    label: str
    settings: tuple[str, ...]
    """Changes to the recipe, such as the device's type."""
    variables: Mapping[str, str]
    traced: bool = True
    """Whether its runs can record layers and operators: those of a mesh are divided over ranks."""


@dataclass(frozen=True)
class Finished:
    path: Path
    seconds: float


@dataclass(frozen=True)
class Children:
    recipe: str
    """A file, or a name of the library."""
    settings: tuple[str, ...]
    work: Path
    tell: Callable[[str], None]
    time_limit: float

    def train(self, name: str, side: TrainedSide, settings: Sequence[str] = (), *, why: str) -> Finished:
        """One run of the recipe; what was finished before is not run again."""
        output, log, note = (self.work / f"{name}{ending}" for ending in ("", ".log", ".json"))
        self.work.mkdir(parents=True, exist_ok=True)
        changes = [*self.settings, *side.settings, *settings]
        how = {
            "recipe": self.recipe,
            "settings": changes,
            "label": side.label,
            "variables": {**side.variables},
        }
        before = _read(note) if output.exists() else {}
        if output.exists() and {key: before.get(key) for key in how} != how:
            # It would be finished here, and its curves taken for those of this device.
            raise LaunchError(f"{output} was run in another way (see {note}); choose another --work")
        # Before the run: one that is stopped on the way must not be finished on another device.
        write_atomically(note, json.dumps({"seconds": 0.0, **before, **how}, indent=1) + "\n")
        self.tell(f"{why}: {Path(self.recipe).stem} on {side.label}")
        begun = time.monotonic()
        command = ["train", self.recipe, *changes, *other_run(output)]
        self._run(f"{name} on {side.label}", command, side.variables, log)
        spent = time.monotonic() - begun + float(before.get("seconds", 0.0))
        write_atomically(note, json.dumps({**how, "seconds": spent}, indent=1) + "\n")
        return Finished(output, spent)

    def hold_against_float64(self, run: Finished, recipe_of: Finished | None = None) -> None:
        """Repeat a run's traced step in float64 on this host, if that was not done before.

        With `recipe_of` another run, only if tokens of a mixture go to other experts than there.
        """
        if read_layer_trace(run.path / TRUTH):
            return
        command = ["parity", "truth", str(run.path)]
        if recipe_of is not None:
            a, b = (read_layer_trace(side.path) for side in (recipe_of, run))
            if not a or min(a) not in b or first_apart(a[min(a)], b[min(a)]) is None:
                return
            command = ["parity", "truth", str(recipe_of.path), "--routes", str(run.path)]
        self.tell(f"P1: the step of {run.path.name} in float64")
        log = run.path.with_name(f"{run.path.name}-{TRUTH}.log")
        try:
            self._run("the step in float64", command, {}, log)
        except LaunchError as error:
            raise LaunchError(f"{error}\n--no-truth judges without it") from None

    def _run(self, name: str, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        command = module_command("isotrain", *arguments)
        with log.open("wb") as file:
            try:
                done = subprocess.run(
                    command,
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=self.time_limit,
                )
            except subprocess.TimeoutExpired:
                raise LaunchError(f"{name}: no end within {self.time_limit:.0f} s; see {log}") from None
        if done.returncode:
            said = log.read_text(errors="replace").strip().splitlines()[-_LAST_WORDS:]
            raise LaunchError(f"{name} failed (all of it in {log}):\n" + "\n".join(said))


def _read(note: Path) -> dict[str, Any]:
    """How an earlier run of that name was made."""
    try:
        content = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True)
class Extent:
    """How much is to be run."""

    budget: float | None = None
    """Seconds for everything; without them, `members` and `seeds`."""
    members: int = MOST_MEMBERS
    seeds: int = 0
    truth: bool = True
    """Whether to hold the traced step against float64; where it is right in float32, no envelope is run."""


@dataclass(frozen=True)
class CertifyPlan:
    replays: bool
    """Whether the recipe samples responses and the candidate is to train on the reference's."""
    free_running: bool
    """Whether it samples responses of its own instead: then only seeds can tell."""
    extent: Extent
    members_of: Callable[[int], Sequence[Sequence[str]]]
    """Changes to the recipe for each of so many members of the envelope."""
    seed: int = 42
    """The recipe's seed; further ones follow it."""


@dataclass(frozen=True)
class Certified:
    verdict: Verdict
    companions: Companions


def certify(
    children: Children,
    reference: TrainedSide,
    candidate: TrainedSide,
    protocol: CertifyPlan,
    tell: Callable[[str], None],
) -> Certified:
    """Run and judge, the cheapest level first."""
    both_traced = reference.traced and candidate.traced
    traced, why = (TRACED, "P0 to P2") if both_traced else (UNTRACED, "P2")
    recorded = (*traced, "rollout.record=true") if protocol.replays else traced
    reference_run = children.train("reference", reference, recorded, why=why)
    if both_traced and protocol.extent.truth:
        children.hold_against_float64(reference_run)
    forced = _replay_of(reference_run) if protocol.replays else ()
    candidate_run = children.train("candidate", candidate, (*traced, *forced), why=why)
    if both_traced and protocol.extent.truth:
        children.hold_against_float64(candidate_run, recipe_of=reference_run)

    def verdict(companions: Companions) -> Verdict:
        return verdict_on(
            reference_run.path, candidate_run.path, companions, free_running=protocol.free_running
        )

    companions = Companions()
    current = verdict(companions)
    # Curves that part may do so by rounding alone, which only the envelope can tell.
    failed = any(current.level(name).state == "different" for name in ("P0", "P1"))
    if failed or current.computation.inputs or current.computation.broken:
        return Certified(current, companions)
    chosen = _plan(protocol, reference_run, candidate_run, is_right(current.computation.levels))
    for line in chosen.words():
        tell(line)
    members = [
        children.train(
            f"member-{number}",
            reference,
            (*settings, *((_STEPS,) if both_traced else UNTRACED), *forced),
            why=f"P3, member {number} of {chosen.members}",
        ).path
        for number, settings in enumerate(protocol.members_of(chosen.members), start=1)
    ]
    companions = Companions(members)
    current = verdict(companions)
    if current.computation.verdict == "different":
        return Certified(current, companions)
    companions = Companions(members, _pairs(children, reference, candidate, protocol, chosen.seeds))
    return Certified(verdict(companions), companions)


def _replay_of(run: Finished) -> tuple[str, ...]:
    return (path_override("rollout.replay", run.path),)


def _plan(protocol: CertifyPlan, reference_run: Finished, candidate_run: Finished, right: bool) -> Plan:
    envelope = not (protocol.free_running or right)
    extent = protocol.extent
    if extent.budget is None:
        return Plan(extent.members if envelope else 0, extent.seeds, 0.0, right)
    left = extent.budget - reference_run.seconds - candidate_run.seconds
    return replace(
        plan(left, reference_run.seconds, candidate_run.seconds, envelope=envelope), by_truth=right
    )


def _pairs(
    children: Children, reference: TrainedSide, candidate: TrainedSide, protocol: CertifyPlan, seeds: int
) -> list[tuple[Path, Path]]:
    pairs = []
    for number in range(1, seeds + 1):
        untraced = () if reference.traced and candidate.traced else UNTRACED
        settings, why = (f"seed={protocol.seed + number}", *untraced), f"P4, seed {number} of {seeds}"
        records = ("rollout.record=true",) if protocol.replays else ()
        reference_run = children.train(f"seed-{number}-a", reference, (*settings, *records), why=why)
        forced = _replay_of(reference_run) if protocol.replays else ()
        candidate_run = children.train(f"seed-{number}-b", candidate, (*settings, *forced), why=why)
        pairs.append((reference_run.path, candidate_run.path))
    return pairs
