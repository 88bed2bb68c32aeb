"""What keeps a pair from being called equivalent although its rewards are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from isotrain.tools.parity.compare.comparison import compare
from isotrain.tools.parity.compare.outcome import Outcome, outcome_of
from isotrain.tools.parity.run import Numbers, RunLog, Series
from isotrain.tools.parity.verdict import judge

STEPS_S = np.arange(1, 201)
LEVELS = {
    "response_length/mean": 250 + 100 * (1 - np.exp(-STEPS_S / 80)),
    "actor/ppo_kl": np.full(200, 5e-4),
    "actor/entropy": 0.1 + 0.5 * np.exp(-STEPS_S / 50),
    "actor/grad_norm": np.full(200, 0.3),
    "actor/pg_clipfrac": np.full(200, 2e-3),
    "perf/throughput": np.full(200, 1000.0),
}
SCORE = "val-core/openai/gsm8k/reward/mean@1"


def grpo(seed: int, score: float = 0.6, **changes: Callable[[Numbers], Numbers]) -> RunLog:
    """A free-running run whose other metrics vary by a tenth; `changes` are by the last part of a name."""
    draw = np.random.default_rng(seed)
    reward_S = 0.3 + 0.4 * (1 - np.exp(-STEPS_S / 60)) + 0.01 * draw.normal(size=200)
    metrics = {
        name: Series(STEPS_S, level_S * np.exp(0.1 * draw.normal(size=200)))
        for name, level_S in LEVELS.items()
    }
    metrics["actor/ppo_kl"].values_S[:] += 2e-4 * draw.normal(size=200)
    for name, change in changes.items():
        full = next(one for one in metrics if name in one)
        metrics[full] = Series(STEPS_S, change(metrics[full].values_S))
    metrics["critic/rewards/mean"] = Series(STEPS_S, reward_S)
    metrics["critic/score/mean"] = Series(STEPS_S, reward_S.copy())
    metrics[SCORE] = Series(np.array([50, 100, 150, 200]), np.linspace(0.4, score, 4))
    return RunLog(Path(f"run-{seed}"), "test", metrics)


def outcome(a: RunLog, b: RunLog, *, items: int | None = None, allow: tuple[str, ...] = ()) -> Outcome:
    return outcome_of(compare(a, b, allow=allow), "free-running", items=items)


@pytest.mark.parametrize("seed", range(4))
def test_honest_pairs_have_none(seed: int) -> None:
    result = outcome(grpo(2 * seed), grpo(2 * seed + 1, score=0.59))
    assert result.verdict == "equivalent" and not result.objections


GROWING_S = np.exp(np.linspace(0, 3, 200))
WRONG: dict[str, tuple[str, Callable[[Numbers], Numbers]]] = {
    "collapsed length": ("response_length", lambda x_S: np.where(STEPS_S > 100, 0.2, 1.0) * x_S),
    "runaway KL": ("ppo_kl", lambda x_S: x_S + 1e-3 * GROWING_S**2),
    "entropy collapse": ("entropy", lambda x_S: x_S / GROWING_S),
    "gradient norm x30": ("grad_norm", lambda x_S: 30 * x_S),
    "clip fraction": ("clipfrac", lambda x_S: x_S + 0.2),
    "throughput": ("throughput", lambda x_S: 0.3 * x_S),
    "growth": ("grad_norm", lambda x_S: x_S * np.exp(np.linspace(-0.6, 0.6, 200))),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_looks_wrong_blocks_equivalent_and_is_said(name: str) -> None:
    metric, change = WRONG[name]
    pair = grpo(1), grpo(2, **{metric: change})
    result = outcome(*pair)
    assert result.verdict == "inconclusive" and [metric in one.words for one in result.objections] == [True]
    found = judge(compare(*pair), result, [])
    assert "Also looks wrong: " in found.words.splitlines()[1] and found.exit_code == 3
    intended = result.objections[0].name
    assert outcome(*pair, allow=(intended,)).verdict == "equivalent"


def test_a_faster_candidate_is_not_wrong() -> None:
    assert not outcome(grpo(1), grpo(2, throughput=lambda x_S: 4 * x_S)).objections


def test_a_gradient_norm_that_is_not_a_number_blocks() -> None:
    broken = grpo(2, grad_norm=lambda x_S: np.where(STEPS_S > 150, np.nan, x_S))
    assert "not a number at step 151" in outcome(grpo(1), broken).objections[0].words


def test_worse_validation_blocks_where_its_size_is_unknown() -> None:
    result = outcome(grpo(1), grpo(2, score=0.5))
    assert result.verdict == "inconclusive" and SCORE in result.objections[0].words
    assert outcome(grpo(1), grpo(2, score=0.5), allow=("validation",)).verdict == "equivalent"


@pytest.mark.parametrize(
    ("items", "score", "verdict"),
    [(1319, 0.5, "different"), (1319, 0.595, "equivalent"), (100, 0.595, "inconclusive")],
)
def test_validation_counts_where_its_size_is_known(items: int, score: float, verdict: str) -> None:
    """One in sqrt(n): 0.6 and 0.5 of 1,319 items have an interval of -0.138 to -0.062."""
    assert outcome(grpo(1), grpo(2, score=score), items=items).verdict == verdict


def test_the_binomial_interval_by_hand() -> None:
    result = outcome(grpo(1), grpo(2, score=0.5), items=1319)
    effect = next(one for one in result.effects if one.kind == "score")
    interval = effect.windows[0].interval
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((-0.1376, -0.0622), abs=5e-4)


def test_identical_metrics_count_once() -> None:
    pair = grpo(1), grpo(2)
    result = outcome(*pair)
    assert {one.metric: one.same_as for one in result.effects if one.same_as} == {
        "critic/score/mean": "critic/rewards/mean"
    }
    assert "more metrics" not in judge(compare(*pair), result, []).words
    once = replace(pair[1], metrics={k: v for k, v in pair[1].metrics.items() if k != "critic/score/mean"})
    assert [one.windows for one in outcome(pair[0], once).effects if one.kind == "reward"] == [
        one.windows for one in result.effects if one.kind == "reward" and not one.same_as
    ]
