"""Equivalence and outcome over seeds, and what a budget pays for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from known_curves import falling, run_of

from isotrain.errors import RecipeError
from isotrain.parity.budget import plan, seconds_of
from isotrain.parity.equivalence import equivalence_level, quantile, tost
from isotrain.parity.outcome import interquartile_mean, outcome_level
from isotrain.parity.run import Run, Series


def pairs(seeds: int, shift: float, own_noise: float) -> list[tuple[Run, Run]]:
    """Seeds differ by 0.1 at the end of their runs; the devices by `shift`, and by chance."""
    draw = np.random.default_rng(1)
    found = []
    for seed in range(seeds):
        end = 0.1 * draw.normal()
        a = falling(seed=seed) + end
        b = a + shift + own_noise * draw.normal()
        score = np.full(80, 0.5 + end)
        found.append((run_of(loss=a, x=score), run_of(loss=b, x=score)))
    return found


@pytest.mark.parametrize(
    ("shift", "noise", "state"),
    [(0.0, 0.01, "same"), (0.2, 0.01, "different"), (0.0, 0.2, "cannot tell"), (0.03, 0.05, "cannot tell")],
)
def test_equivalence(shift: float, noise: float, state: str) -> None:
    assert equivalence_level(pairs(8, shift, noise)).state == state


def test_two_seeds_show_nothing() -> None:
    assert equivalence_level(pairs(2, 0.0, 0.0)).state == "not run"
    assert outcome_level(pairs(2, 0.0, 0.0)).state == "not run"


def test_tost_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, standard error 1/sqrt(3), t(2) = 2.920."""
    found = tost(np.array([1.0, 2.0, 3.0]), spread=10.0)
    assert found.mean == 2.0
    assert found.half == pytest.approx(2.919986 / np.sqrt(3))
    assert found.margin == 5.0 and found.state == "same"
    assert tost(np.array([1.0, 2.0, 3.0]), spread=2.0).state == "cannot tell"
    assert tost(np.array([11.0, 12.0, 13.0]), spread=2.0).state == "different"


def test_quantiles_as_in_print() -> None:
    """Student's t, one-sided 95 %, of printed tables for seeds - 1 degrees of freedom; 1.645 is the limit."""
    printed = {3: 2.920, 11: 1.812, 21: 1.725, 22: 1.721, 26: 1.708, 31: 1.697, 61: 1.671, 121: 1.658}
    assert {seeds: round(quantile(seeds), 3) for seeds in printed} == printed


def with_scores(a: list[float], b: list[float]) -> list[tuple[Run, Run]]:
    def run(value: float) -> Run:
        made = run_of(loss=np.array([value]))
        return Run(made.path, made.format, {"val-core/gsm8k/reward/mean@1": made.metrics["train/loss"]})

    return [(run(x), run(y)) for x, y in zip(a, b, strict=True)]


def test_scores() -> None:
    scores = [0.50, 0.52, 0.48, 0.51, 0.49]
    assert outcome_level(with_scores(scores, scores)).state == "same"
    assert outcome_level(with_scores(scores, [s - 0.1 for s in scores])).state == "different"
    assert outcome_level(with_scores(scores, scores[::-1])).state == "cannot tell"
    assert outcome_level(with_scores([1.0] * 4, [0.6] * 4)).state == "different"
    assert outcome_level(with_scores([1.0] * 4, [1.0] * 4)).state == "same"
    assert outcome_level(with_scores(scores, [*scores[:4], np.nan])).state == "different"
    assert outcome_level(pairs(5, 0.0, 0.0)).state == "not run"  # no validation


def test_one_slice_that_is_worse_decides() -> None:
    """Over all slices the interquartile mean would leave it out."""
    draw = np.random.default_rng(3)
    pairs = []
    for _ in range(6):
        metrics = [
            {f"val-core/{n}/reward/mean@1": x for n, x in enumerate(0.5 + 0.01 * draw.normal(size=5))}
        ] * 2
        worse = {**metrics[1], "val-core/2/reward/mean@1": metrics[1]["val-core/2/reward/mean@1"] - 0.1}
        pairs.append(tuple(_with_metrics(m) for m in (metrics[0], worse)))
    found = outcome_level(pairs)  # type: ignore[arg-type]
    assert found.state == "different" and "val-core/2/" in found.words


def _with_metrics(values: dict[str, float]) -> Run:
    made = {name: Series(np.array([1]), np.array([value])) for name, value in values.items()}
    return Run(Path("run"), "test", made)


def test_one_failed_seed_does_not_decide_the_interquartile_mean() -> None:
    assert interquartile_mean(np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -50.0])) == 1.0


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
