"""The weight check: what it allows, and which moves it takes for wrong.

T: tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isotrain.data.encode import Prompt
from isotrain.data.pictures import Picture
from isotrain.weights.check import (
    CHECK_TOKENS,
    TOLERANCE,
    Tolerance,
    WeightCheck,
    check_pictures,
    check_prompts,
)

TOKENS = 256


def normal(seed: int, scale: float) -> Any:
    return (scale * np.random.default_rng(seed).standard_normal(TOKENS)).astype(np.float32)


def test_what_is_allowed_does_not_follow_what_was_accepted() -> None:
    """A difference that grows by 3 % with each update once passed up to 0.489."""
    check, trained_T, difference = WeightCheck(TOLERANCE["bfloat16"]), np.zeros(TOKENS, np.float32), 0.03
    largest = 0.0
    for version in range(100):
        if check.problem(0, version, trained_T + difference, trained_T):
            break
        largest, difference = difference, 1.03 * difference
    assert 0.03 < largest <= 0.09


def test_tolerance_grows_with_first_difference_and_change() -> None:
    usual, fixed = Tolerance(0.3, 0.05, 0.05), Tolerance.fixed(0.2)
    assert usual.allowed(0.001, 0.0) == 0.05 and usual.allowed(0.04, 0.0) == 0.12
    assert usual.allowed(0.04, 2.0) == pytest.approx(0.22)
    assert {fixed.allowed(start, moved) for start in (0.01, 0.2) for moved in (0.0, 9.0)} == {0.2}


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-5), ("bfloat16", 0.06)])
@pytest.mark.parametrize("taken", [1.0, 0.0, 0.5, -1.0])
def test_a_move_that_the_engine_does_not_make(dtype: str, rounding: float, taken: float) -> None:
    """The trained model moves ever farther, the engine `taken` as far; rounding is new at every update."""
    check, trained_T, move_T = WeightCheck(TOLERANCE[dtype]), normal(0, 3.0), normal(1, rounding)
    found = None
    for version in range(40):
        engine_T = trained_T + taken * version * move_T + normal(2 + version, rounding)
        problem = check.problem(0, version, engine_T, trained_T + version * move_T)
        if problem:
            found = version
            assert "at weight update 0, and the trained model has moved by" in problem
            break
    assert found is None if taken == 1.0 else found is not None and found < 30


def test_each_engine_has_its_own_start() -> None:
    check, trained_T = WeightCheck(TOLERANCE["bfloat16"]), np.zeros(TOKENS, np.float32)
    assert not check.problem(0, 1, trained_T + 0.2, trained_T)
    assert not check.problem(1, 1, trained_T + 0.01, trained_T)
    assert not check.problem(0, 2, trained_T + 0.2, trained_T)
    assert "differ from the trained model by 0.2 on average; 0.03 is allowed" in check.problem(
        1, 2, trained_T + 0.2, trained_T
    )


@pytest.mark.parametrize("tolerance", [TOLERANCE["float32"], Tolerance.fixed(100.0)])
def test_nan_is_never_accepted(tolerance: Tolerance) -> None:
    check, trained_T = WeightCheck(tolerance), np.zeros(TOKENS, np.float32)
    assert "differ from the trained model by nan" in check.problem(0, 1, trained_T * np.nan, trained_T)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([1], [2]),
        ([1, 5, 3], [2, 5, 3]),
        ([300], [256]),
        ([100, 100, 100], [100, 100, 56]),
        ([255, 9], [255]),
    ],
)
def test_prompts_of_the_check(lengths: list[int], expected: list[int]) -> None:
    store: Any = [Prompt(np.arange(7, 7 + length, dtype=np.int32), b"{}") for length in lengths]
    prompts = check_prompts(store)
    assert [len(prompt_P) for prompt_P in prompts] == expected and sum(expected) <= CHECK_TOKENS
    assert all(prompt_P.dtype == np.int32 and prompt_P[0] == 7 for prompt_P in prompts)


def test_the_first_picture_of_the_check_is_whole() -> None:
    """In a prompt that would be cut before it; what is cut after it takes no picture along."""
    first, second = (Picture(np.zeros((16, 3), np.uint8), (1, 4, 4), at, 4, "") for at in (300, 303))
    seen = {1: (first, second), 2: (first,)}
    store: Any = [
        Prompt(np.zeros(length, np.int32), b"{}", lambda row=row: seen.get(row, ()))
        for row, length in enumerate((100, 400, 400))
    ]
    prompts = check_prompts(store)
    assert [len(prompt_P) for prompt_P in prompts] == [100, 305]
    assert check_pictures(prompts, lambda row: seen.get(row, ())) == [(), (first,)]
