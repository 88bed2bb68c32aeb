"""The protocol from one recipe: runs on two devices level by level, until one fails or time is up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from isotrain.parity.budget import MOST_MEMBERS, Plan, plan
from isotrain.parity.children import Children, Finished, Side
from isotrain.parity.protocol import Companions, verdict_on
from isotrain.parity.verdict import Verdict
from isotrain.recipe.load import path_override

# Enough to see rounding grow from one update to the next.
_STEPS = "observe.layer_trace=3"
TRACED = (_STEPS, "observe.operators=true")
"""What a run needs so that its layers and operators can be compared."""
UNTRACED = ("observe.layer_trace=0", "observe.operators=false", "observe.model_digest=true")
"""What it needs so that its curves can be certified, where a mesh divides its layers over ranks."""


@dataclass(frozen=True)
class Protocol:
    """How much is to be run."""

    replays: bool
    """Whether the recipe samples responses and the candidate is to train on the reference's."""
    free_running: bool
    """Whether it samples responses of its own instead: then only seeds can tell."""
    budget: float | None
    """Seconds for everything; None runs an envelope and no seeds."""
    members_of: Callable[[int], Sequence[Sequence[str]]]
    """Changes to the recipe for each of so many members of the envelope."""
    members: int = MOST_MEMBERS
    seeds: int = 0
    seed: int = 42
    """Of the recipe; further ones follow it."""


@dataclass(frozen=True)
class Certified:
    verdict: Verdict
    companions: Companions


def certify(
    children: Children, reference: Side, candidate: Side, protocol: Protocol, tell: Callable[[str], None]
) -> Certified:
    """Run and judge, the cheapest level first."""
    both_traced = reference.traced and candidate.traced
    traced, why = (TRACED, "P0 to P2") if both_traced else (UNTRACED, "P2")
    recorded = (*traced, "rollout.record=true") if protocol.replays else traced
    one = children.train("reference", reference, recorded, why=why)
    forced = _replay_of(one) if protocol.replays else ()
    other = children.train("candidate", candidate, (*traced, *forced), why=why)

    def verdict(companions: Companions) -> Verdict:
        return verdict_on(one.path, other.path, companions, free_running=protocol.free_running)

    companions = Companions()
    found = verdict(companions)
    # Curves that part may do so by rounding alone, which only the envelope can tell.
    failed = any(found.level(name).state == "different" for name in ("P0", "P1"))
    if failed or found.computation.inputs or found.computation.broken:
        return Certified(found, companions)
    chosen = _plan(protocol, one, other)
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
    found = verdict(companions)
    if found.computation.verdict == "different":
        return Certified(found, companions)
    companions = Companions(members, _pairs(children, reference, candidate, protocol, chosen.seeds))
    return Certified(verdict(companions), companions)


def _replay_of(run: Finished) -> tuple[str, ...]:
    return (path_override("rollout.replay", run.path),)


def _plan(protocol: Protocol, one: Finished, other: Finished) -> Plan:
    if protocol.budget is None:
        members = 0 if protocol.free_running else protocol.members
        return Plan(members, protocol.seeds, 0.0)
    left = protocol.budget - one.seconds - other.seconds
    return plan(left, one.seconds, other.seconds, envelope=not protocol.free_running)


def _pairs(
    children: Children, reference: Side, candidate: Side, protocol: Protocol, seeds: int
) -> list[tuple[Path, Path]]:
    pairs = []
    for number in range(1, seeds + 1):
        untraced = () if reference.traced and candidate.traced else UNTRACED
        settings, why = (f"seed={protocol.seed + number}", *untraced), f"P4, seed {number} of {seeds}"
        records = ("rollout.record=true",) if protocol.replays else ()
        one = children.train(f"seed-{number}-a", reference, (*settings, *records), why=why)
        forced = _replay_of(one) if protocol.replays else ()
        other = children.train(f"seed-{number}-b", candidate, (*settings, *forced), why=why)
        pairs.append((one.path, other.path))
    return pairs
