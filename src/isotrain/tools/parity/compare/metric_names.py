"""The metrics to compare, where the two runs may have other names for them: `loss=train/loss`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from isotrain.errors import DataError
from isotrain.tools.parity.read.bounded import clipped
from isotrain.tools.parity.run import RunLog

_SHOWN = 5
_COMPARED, _LONGEST = 2_000, 100


@dataclass(frozen=True)
class Chosen:
    reference: RunLog
    candidate: RunLog
    """Its metrics under the reference's names."""
    metrics: tuple[str, ...]
    """By the reference's names, in the order that they were asked for; empty if none was."""


def choose(texts: Sequence[str], reference: RunLog, candidate: RunLog) -> Chosen:
    """`texts` as --metric has them: `loss`, or `loss=train/loss` where the candidate has another name for it.

    A metric that a run lacks is an error, with the names that may have been meant.
    """
    metrics = dict(candidate.metrics)
    chosen: dict[str, str] = {}
    for text in texts:
        ours, theirs = _names(text, reference, candidate)
        if chosen.get(ours, theirs) != theirs:
            raise DataError(
                f"--metric names {clipped(ours)} twice: as {clipped(chosen[ours])} and {clipped(theirs)}"
            )
        chosen[ours] = theirs
        if ours != theirs:
            metrics[ours] = candidate.metrics[theirs]
    # What was renamed is not there a second time under its own name, unless that is asked for too.
    for ours, theirs in chosen.items():
        if ours != theirs and theirs not in chosen:
            metrics.pop(theirs, None)
    return Chosen(reference, replace(candidate, metrics=metrics) if chosen else candidate, tuple(chosen))


def _names(text: str, reference: RunLog, candidate: RunLog) -> tuple[str, str]:
    """The reference's name and the candidate's."""
    # A name may have an equals sign in it.
    if text in reference.metrics and text in candidate.metrics:
        return text, text
    ours, equals, theirs = (part.strip() for part in text.partition("="))
    if not equals:
        if not ours:
            raise DataError("--metric is empty: give the name of a metric")
        theirs = ours
    elif not ours or not theirs:
        raise DataError(f"--metric {clipped(text)}: write REFERENCE=CANDIDATE, such as loss=train/loss")
    for run, name in ((reference, ours), (candidate, theirs)):
        if name not in run.metrics:
            path = clipped(str(run.path), 300)
            raise DataError(f"{path} has no metric {clipped(name, 200)}: {_instead(run, name)}")
    return ours, theirs


def _instead(run: RunLog, name: str) -> str:
    # Bounded, because a stranger's log may have many and long names.
    known = [metric for metric in list(run.metrics)[:_COMPARED] if len(metric) <= _LONGEST]
    close = get_close_matches(name[:_LONGEST], known, n=_SHOWN, cutoff=0.5)
    # `loss` is far from `actor/pg_loss` by its letters.
    parts = {part for part in name.lower().replace("_", "/").split("/") if len(part) > 2}
    close += [
        metric for metric in known if metric not in close and any(part in metric.lower() for part in parts)
    ]
    if close:
        return "did you mean " + ", ".join(clipped(metric, 200) for metric in close[:_SHOWN]) + "?"
    some = ", ".join(clipped(metric, 200) for metric in list(run.metrics)[:_SHOWN])
    more = len(run.metrics) - _SHOWN
    return f"it has {some}" + (f" and {more} more" if more > 0 else "")
