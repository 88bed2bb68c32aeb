"""Flips of a router: scores and routes in, what rounding explains out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from isotrain.tools.parity.levels.routes import Flips, _flips

ERROR = 1e-2
T, E, K = 4000, 8, 2


def scores() -> npt.NDArray[np.float64]:
    return np.random.default_rng(0).normal(size=(T, E))


def routes(scores_TE: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
    return np.argsort(-scores_TE, axis=1)[:, :K].astype(np.int32)


def judged(scores_TE: npt.NDArray[np.float64], route_TK: npt.NDArray[np.int32]) -> Flips:
    return _flips(1, "experts", "candidate", scores_TE, route_TK, ERROR)


@pytest.mark.parametrize("seed", range(20))
def test_errors_of_the_expected_size_explain_their_flips(seed: int) -> None:
    noise_TE = np.random.default_rng(seed + 1).normal(size=(T, E)) * ERROR
    flips = judged(scores(), routes(scores() + noise_TE))
    assert flips.count > 10 and flips.state == "same", flips


@pytest.mark.parametrize(("times", "states"), [(3, {"same", "cannot tell"}), (40, {"different"})])
def test_larger_errors_are_less_and_less_explained(times: float, states: set[str]) -> None:
    noise_TE = np.random.default_rng(1).normal(size=(T, E)) * ERROR * times
    assert judged(scores(), routes(scores() + noise_TE)).state in states


@pytest.mark.parametrize(("gap", "state"), [(3.9, "same"), (6.0, "cannot tell"), (8.1, "different")])
def test_one_distant_flip_decides(gap: float, state: str) -> None:
    apart_TE = np.tile(np.arange(E, 0.0, -1.0), (T, 1))
    apart_TE[7, 2] = apart_TE[7, 1] - gap * ERROR * np.sqrt(2)
    route_TK = routes(apart_TE)
    route_TK[7] = 2, 0
    flips = judged(apart_TE, route_TK)
    assert flips.count == 1 and flips.furthest == pytest.approx(gap) and flips.state == state
    if state != "same":
        assert "1 of 4000 tokens" in flips.words and f"{gap:.3g} expected errors" in flips.words


def test_many_flips_of_moderate_distance_are_too_many() -> None:
    """Every token's second and third scores are 3 errors apart: a few of 4,000 may flip, and not all."""
    apart_TE = np.tile(np.arange(E, 0.0, -1.0), (T, 1))
    apart_TE[:, 2] = apart_TE[:, 1] - 3 * ERROR * np.sqrt(2)
    flips = judged(apart_TE, np.tile(np.array([0, 2], np.int32), (T, 1)))
    assert flips.furthest == pytest.approx(3) and flips.state == "different"
    assert "rounding explains" in flips.words
    few_TK = routes(apart_TE)
    few_TK[:5] = 0, 2
    assert judged(apart_TE, few_TK).state == "same"


def test_ties_may_all_be_broken_in_one_way() -> None:
    apart_TE = np.tile(np.arange(E, 0.0, -1.0), (T, 1))
    apart_TE[:, 2] = apart_TE[:, 1] - 1e-7
    assert judged(apart_TE, np.tile(np.array([0, 2], np.int32), (T, 1))).state == "same"


def test_the_order_of_a_tokens_experts_means_nothing() -> None:
    assert judged(scores(), routes(scores())[:, ::-1]).count == 0


def test_one_expert_twice_and_one_that_is_not_there_are_wrong() -> None:
    twice_TK = routes(scores())
    twice_TK[3] = twice_TK[3, 0]
    assert judged(scores(), twice_TK).state == "different"
    missing_TK = routes(scores())
    missing_TK[3, 1] = E
    assert judged(scores(), missing_TK).state == "different"


def test_a_masked_score_has_no_distance() -> None:
    masked_TE = scores()
    masked_TE[5, 4:] = -np.inf
    route_TK = routes(masked_TE)
    route_TK[5, 1] = 6
    assert judged(masked_TE, route_TK).state == "cannot tell"
