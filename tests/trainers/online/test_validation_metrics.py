"""Validation metrics by hand."""

from __future__ import annotations

import numpy as np
import pytest

from isotrain.trainers.online.messages import Group, Responses, Score
from isotrain.trainers.online.metrics import Failures, validation_metrics


def group(place: int, source: str, scores: tuple[float, ...]) -> Group:
    n = len(scores)
    responses = Responses(place, place, 4, (2,) * n, (2,) * n, (True,) * n, 0, 0.0)
    return Group(responses, place, tuple(Score(score, {}, None, "") for score in scores), source)


def test_each_source_has_the_mean_of_its_prompts() -> None:
    groups = [
        group(-1, "sums", (1.0, 0.0, 0.5)),  # 0.5
        group(-2, "proofs", (1.0, 1.0, 0.25)),  # 0.75
        group(-3, "sums", (0.0, 0.25, 0.5)),  # 0.25
    ]
    scores_R = np.array([score.value for g in groups for score in g.scores])
    wanted = {"val-core/sums/reward/mean@3": 0.375, "val-core/proofs/reward/mean@3": 0.75}
    assert validation_metrics(groups, scores_R, Failures(9)) == pytest.approx(wanted)
    # What models on the ranks have added is in the scores and not in the groups.
    doubled = {name: 2 * value for name, value in wanted.items()}
    failures = Failures(9, {"timeout": 1, "error": 1}, "timeout: too slow")
    assert validation_metrics(groups, 2 * scores_R, failures) == pytest.approx(
        {**doubled, "val/reward_failures": 2.0}
    )
