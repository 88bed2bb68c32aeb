"""What keeps a pair from being called equivalent although its losses and rewards are within the margin.

None of it makes the pair different by itself: somebody has to look at it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from isotrain.language import tr
from isotrain.tools.parity.run import ROLES, RunLog, Series


@dataclass(frozen=True)
class Objection:
    name: Literal["steps"]
    """What `--allow` calls it."""
    words: str


def ended_early(reference: RunLog, candidate: RunLog, metrics: Sequence[str]) -> Iterator[Objection]:
    """A run whose compared metrics end before its plan or before the other run's, by more than one record."""
    runs = {"reference": reference, "candidate": candidate}
    for role, run in runs.items():
        other = runs["candidate" if role == "reference" else "reference"]
        planned = run.planned_steps or 0
        endings = []
        for metric in metrics:
            series, other_series = run.metrics[metric], other.metrics[metric]
            expected = max(int(other_series.steps_S[-1]), planned)
            last = int(series.steps_S[-1])
            if expected - last > max(_recording_interval(series), _recording_interval(other_series)):
                endings.append((last, expected))
        if endings:
            last, expected = min(endings)
            words = tr(
                "the {role} ended at step {last:,} of {expected:,}",
                role=ROLES[role],
                last=last,
                expected=expected,
            )
            yield Objection("steps", words)


def _recording_interval(series: Series) -> float:
    """Steps from one record to the next; a log may lack what came after its last record."""
    return float(np.median(np.diff(series.steps_S))) if len(series) > 1 else 1.0
