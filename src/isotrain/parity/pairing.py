"""Whether two runs went through the same data step by step, or sampled responses of their own."""

from __future__ import annotations

import re
from typing import Literal

from isotrain.language import tr
from isotrain.parity import thresholds
from isotrain.parity.published import kind_of
from isotrain.parity.run import Run, common, section
from isotrain.parity.statistics import correlation

Pairing = Literal["paired", "free-running"]
PAIRINGS: dict[Pairing, str] = {"paired": tr("paired"), "free-running": tr("free-running")}

# What only runs that sample have in their logs, by their names in verl, OpenRLHF, TRL and isotrain.
_SAMPLED = re.compile(
    r"(^|/)(response_length|completions?|completion_length|num_tokens_generated|pg_loss|ppo_kl|advantages?)(/|$)"
    r"|(^|/)(policy_loss|act_loss|pg_clipfrac|response_length_mean|rollout_logp_diff_mean)$"
)


def pairing_of(reference: Run, candidate: Run, *, free: bool = False) -> Pairing:
    """`free` says that they are free-running, whatever the runs look like."""
    if free:
        return "free-running"
    if not (_samples(reference) and _samples(candidate)):
        return "paired"
    return "paired" if _together(reference, candidate) else "free-running"


def _samples(run: Run) -> bool:
    """Whether a run trains on responses that it sampled."""
    if run.recipe is not None:
        rollout = section(run.recipe, "rollout")
        return bool(rollout) and rollout.get("replay") is None
    return any(_SAMPLED.search(name) or kind_of(name) == "reward" for name in run.metrics)


def _together(reference: Run, candidate: Run) -> bool:
    """Whether every loss and reward changes alike: they sampled the same, or one replayed the other."""
    found = []
    for name, series in reference.metrics.items():
        if kind_of(name) is None or name not in candidate.metrics:
            continue
        _, (a_S, b_S) = common([series, candidate.metrics[name]])
        changes = correlation(a_S[1:] - a_S[:-1], b_S[1:] - b_S[:-1])
        if changes is not None:
            found.append(changes)
    return bool(found) and min(found) >= thresholds.DIFFERENT_CORRELATION
