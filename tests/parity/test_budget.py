"""What an amount of time pays for."""

from __future__ import annotations

import pytest

from isotrain.errors import RecipeError
from isotrain.parity.budget import plan, seconds_of


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400)])
def test_budgets_are_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "-3m", "1e9s", "nan s"])
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="such as 30m"):
        seconds_of(text)


def test_the_envelope_comes_before_seeds() -> None:
    assert (plan(25, 10, 10).members, plan(25, 10, 10).seeds) == (0, 0)
    assert (plan(45, 10, 10).members, plan(45, 10, 10).seeds) == (4, 0)
    assert (plan(150, 10, 10).members, plan(150, 10, 10).seeds) == (8, 3)
    assert plan(125, 10, 10).seeds == 2  # with the compared pair there are three
    assert plan(150, 10, 10, envelope=False).members == 0
    assert plan(10_000, 10, 10).seconds <= 10_000


def test_a_plan_says_what_it_buys() -> None:
    told = " ".join(plan(150, 10, 10).words())
    assert "8 members" in told and "4 seeds" in told
    assert "no envelope" in " ".join(plan(5, 10, 10).words())
