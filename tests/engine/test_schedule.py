from __future__ import annotations

import math

import pytest

from isotrain.engine.optimizer import FALLS, make_schedule


def values(kind: str, total: int, warmup: float, floor: float = 0.0, lr: float = 2.0) -> list[float]:
    schedule = make_schedule(kind, lr, total, warmup, floor)
    return [schedule(step) for step in range(1, total + 1)]


def test_linear_by_hand() -> None:
    assert values("linear", 6, warmup=1 / 3) == pytest.approx([1.0, 2.0, 2.0, 1.5, 1.0, 0.5])
    assert values("linear", 4, warmup=0.0) == pytest.approx([2.0, 1.5, 1.0, 0.5])


def test_cosine_by_hand() -> None:
    root = math.sqrt(0.5)
    assert values("cosine", 6, warmup=1 / 3) == pytest.approx([1.0, 2.0, 2.0, 1 + root, 1.0, 1 - root])


def test_constant_by_hand() -> None:
    assert values("constant", 5, warmup=0.4, floor=0.1) == [1.0, 2.0, 2.0, 2.0, 2.0]
    assert values("constant", 3, warmup=0.0) == [2.0, 2.0, 2.0]


def test_it_falls_towards_the_least_share() -> None:
    assert values("linear", 6, 1 / 3, floor=0.2) == pytest.approx([1.0, 2.0, 2.0, 1.6, 1.2, 0.8])
    root = math.sqrt(0.5)
    assert values("cosine", 6, 1 / 3, floor=0.2)[3:] == pytest.approx(
        [1.2 + 0.8 * root, 1.2, 1.2 - 0.8 * root]
    )


def test_warm_up_in_steps() -> None:
    """It equals the ratio of the same number of steps; a longer one than the run ends below the top."""
    in_steps = make_schedule("linear", 2.0, 6, 0.5, 0.0, warmup_steps=2)
    assert [in_steps(step) for step in range(1, 7)] == values("linear", 6, warmup=1 / 3)
    assert make_schedule("cosine", 2.0, 4, 0.5, 0.0, warmup_steps=0)(1) == 2.0
    longer = make_schedule("constant", 2.0, 2, 0.0, 0.0, warmup_steps=4)
    assert [longer(1), longer(2)] == [0.5, 1.0]


@pytest.mark.parametrize("kind", FALLS)
def test_a_single_step_trains(kind: str) -> None:
    assert values(kind, 1, warmup=0.1) == [2.0]


@pytest.mark.parametrize("kind", FALLS)
def test_it_rises_to_the_peak_and_never_again(kind: str) -> None:
    rates = values(kind, 100, warmup=0.1)
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert max(rates) == rates[9] == 2.0
    assert rates[9:] == sorted(rates[9:], reverse=True)


@pytest.mark.parametrize("kind", FALLS)
def test_nothing_but_warm_up(kind: str) -> None:
    assert values(kind, 4, warmup=1.0) == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("kind", FALLS)
def test_after_the_end_it_stays(kind: str) -> None:
    schedule = make_schedule(kind, 2.0, 10, 0.1, 0.25)
    assert schedule(11) == schedule(1000) == (2.0 if kind == "constant" else 0.5)


def test_warm_up_steps_are_rounded() -> None:
    assert values("constant", 14, warmup=0.1)[:2] == [2.0, 2.0]  # 1.4 steps are one
    assert values("constant", 16, warmup=0.1)[:2] == [1.0, 2.0]  # 1.6 steps are two
