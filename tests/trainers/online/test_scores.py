"""Scores of workers and models added up; one that no training could use is a failure."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from isotrain.trainers.online.messages import Group, Responses, Score
from isotrain.trainers.online.metrics import total_scores

GROUPS = [
    Group(
        Responses(0, 0, 3, (1,) * 4, (1,) * 4, (True,) * 4, 0, 0.0),
        0,
        (*(Score(v, {}, None, "") for v in (1.0, 2.0, 3.0)), Score(-1.0, {}, "timeout", "slow")),
        "data",
    )
]


def test_weighted_sums_and_means_without_failed_responses() -> None:
    scored = total_scores(GROUPS, {"model": np.array([0.5, 1.0, 1.5, 9.0])}, {"model": 2.0}, -1.0)
    assert scored.scores_E.tolist() == [2.0, 4.0, 6.0, -1.0]
    assert scored.metrics == {"reward/model/mean": 1.0}
    assert scored.failures.causes == {"timeout": 1}


@pytest.mark.parametrize(
    ("preference", "weight"), [(math.nan, 2.0), (math.inf, 2.0), (-math.inf, 2.0), (1e38, 4.0), (1e308, 16.0)]
)
def test_a_score_that_is_not_finite_is_an_error(preference: float, weight: float) -> None:
    told = {"process": np.array([0.5, preference, 1.5, math.nan])}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scored = total_scores(GROUPS, told, {"process": weight}, -3.0)
    assert scored.scores_E.tolist() == [1.0 + weight * 0.5, -3.0, 3.0 + weight * 1.5, -1.0]
    assert scored.metrics == {"reward/process/mean": 1.0}
    assert scored.failures.causes == {"timeout": 1, "error": 1} and scored.failures.responses == 4


def test_the_next_model_has_no_say_in_it() -> None:
    told = {"model": np.array([math.nan, 1.0, 1.0, 1.0]), "process": np.array([5.0, 1.0, 1.0, 1.0])}
    scored = total_scores(GROUPS, told, {"model": 1.0, "process": 1.0}, 0.25)
    assert scored.scores_E.tolist() == [0.25, 4.0, 5.0, -1.0]
    assert scored.metrics == {"reward/model/mean": 1.0, "reward/process/mean": 1.0}


def test_a_model_without_scores_fails_every_response() -> None:
    scored = total_scores(GROUPS, {"model": np.full(4, math.nan)}, {"model": 1.0}, 0.0)
    assert scored.scores_E.tolist() == [0.0, 0.0, 0.0, -1.0]
    assert scored.metrics == {} and scored.failures.share == 1.0
