"""P2: what two paired curves alone tell: the same, different, or too close to call without an envelope."""

from __future__ import annotations

from dataclasses import replace

from isotrain.parity.compare import Comparison
from isotrain.parity.levels import Check, Level, State, not_run
from isotrain.parity.statistics import Apart

# Between the two, honest pairs in bfloat16 and small mistakes overlap: the same by curves alone are only
# those that agree to float32's last digits. benchmarks/parity_power.py has the figures of both.
SAME_CORRELATION, DIFFERENT_CORRELATION = 0.999, 0.95
SAME_SHARE, DIFFERENT_SHARE = 2e-6, 0.1


def paired_level(comparison: Comparison) -> Level:
    if not comparison.curves:
        return not_run("P2", "the runs have no curve to compare")
    checks = tuple(check for name, found in comparison.curves.items() for check in _checks(name, found))
    states = {name: _state(found) for name, found in comparison.curves.items()}
    state: State = "same"
    if comparison.broken or "different" in states.values():
        state = "different"
    elif "cannot tell" in states.values():
        state = "cannot tell"
    worst = max(comparison.curves, key=lambda name: comparison.curves[name].share_of_flat or 0.0)
    if state == "different":
        apart = [name for name, found in states.items() if found == "different"]
        apart = list(dict.fromkeys([*apart, *(one.metric for one in comparison.broken)]))
        first = comparison.curves[apart[0]]
        return Level("P2", state, _parting(apart[0], first), checks, _causes(first), {"apart": apart})
    return Level("P2", state, _together(worst, comparison.curves[worst], state), checks)


def tempered(paired: Level, envelope: Level) -> Level:
    """Some trainings part by rounding alone, the envelope's members too: then curves decide nothing.

    Of metrics that the envelope has not looked at, the curves' word stands.
    """
    if paired.state != "different" or envelope.state != "same":
        return paired
    if not set(paired.evidence["apart"]) <= set(envelope.evidence["envelope"]):
        return paired
    words = f"{paired.words}, as runs of the reference do among themselves"
    return replace(paired, state="cannot tell", words=words, causes=())


def _state(found: Apart) -> State:
    correlation, share = found.change_correlation, found.share_of_flat
    if correlation is None or share is None:
        return "same" if found.mean_absolute == 0 else "cannot tell"
    if correlation < DIFFERENT_CORRELATION or share > DIFFERENT_SHARE:
        return "different"
    return "same" if correlation >= SAME_CORRELATION and share <= SAME_SHARE else "cannot tell"


def _checks(name: str, found: Apart) -> list[Check]:
    checks = []
    if found.change_correlation is not None:
        value = found.change_correlation
        checks.append(
            Check(
                f"{name}: correlation of changes",
                value,
                DIFFERENT_CORRELATION,
                value >= DIFFERENT_CORRELATION,
                f"at least; {SAME_CORRELATION} for the same by curves alone",
            )
        )
    if found.share_of_flat is not None:
        share = found.share_of_flat
        note = f"at most; {SAME_SHARE} for the same by curves alone"
        passed = share <= DIFFERENT_SHARE
        checks.append(Check(f"{name}: share of a flat line's error", share, DIFFERENT_SHARE, passed, note))
    return checks


def _together(name: str, found: Apart, state: State) -> str:
    how = f"{name} is {100 * found.mean_absolute:.2g} hundredths apart on average"
    if found.change_correlation is not None:
        how += f", changes correlate {found.change_correlation:.5f}"
    if state == "same":
        return f"the curves agree ({how})"
    return f"the curves are close ({how}), but small mistakes can be as close: an envelope would decide"


def _parting(name: str, found: Apart) -> str:
    where = f" part at step {found.parts_at}" if found.parts_at is not None else " do not agree"
    how = f"{100 * found.mean_absolute:.2g} hundredths apart on average"
    if found.change_correlation is not None:
        how += f", changes correlate {found.change_correlation:.3f}"
    return f"the curves of {name}{where} ({how})"


def _causes(found: Apart) -> tuple[str, ...]:
    """By what the curve does: data decides where single steps lie, everything else how fast it falls."""
    if found.change_correlation is None:
        return ()
    if found.change_correlation < 0.5:
        return ("other data, or another order of it",)
    if abs(found.first) > 10 * abs(found.signed_mean - found.first):
        return ("the loss itself: its mask, its scale or the model's layers, wrong from the first step",)
    return ("the update: learning rate, optimizer or gradient scaling",)
