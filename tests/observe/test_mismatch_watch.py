"""The watch over the mismatch: honest runs raise few alarms, jumps are noticed within a few steps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isotrain.observe.mismatch_watch import FIRST_STEPS, IN_A_ROW, LARGEST_START, METRIC, MismatchWatch
from isotrain.tools.view.run import RunView
from isotrain.trainers.online.loop import OnlineTrainer


def alarms(values: np.ndarray) -> list[int]:
    """Steps at which a run with these values warns."""
    watch = MismatchWatch()
    return [step for step, value in enumerate(values, start=1) if watch.observe(step, float(value))]


def honest(seed: int, steps: int, spread: float, drift: float = 0.0, tails: bool = False) -> np.ndarray:
    """Slow noise in the logarithm around a level, with a drift of so many factors of e over the run."""
    draw = np.random.default_rng(seed)
    noise = draw.standard_t(4, steps) / math.sqrt(2) if tails else draw.standard_normal(steps)
    slow = np.zeros(steps)
    for step in range(1, steps):
        slow[step] = 0.8 * slow[step - 1] + 0.6 * noise[step]
    return np.asarray(0.004 * np.exp(spread * slow + drift * np.arange(steps) / steps))


@pytest.mark.parametrize(
    ("spread", "drift", "tails"),
    [(0.05, 0.0, False), (0.2, 0.0, False), (0.2, 0.0, True), (0.05, 0.7, False), (0.3, -1.0, False)],
)
def test_honest_runs_rarely_warn(spread: float, drift: float, tails: bool) -> None:
    false = sum(bool(alarms(honest(seed, 500, spread, drift, tails))) for seed in range(100))
    assert false <= 3


@pytest.mark.parametrize("factor", [6.0, 100.0])
def test_a_jump_is_noticed_in_a_few_steps(factor: float) -> None:
    for seed in range(20):
        values = honest(seed, 200, 0.1)
        values[100:] *= factor
        steps = alarms(values)
        assert steps and 100 + IN_A_ROW <= steps[0] <= 110


def test_a_run_that_starts_wrong_is_noticed_before_its_first_steps_are_a_measure() -> None:
    assert alarms(np.full(50, 2 * LARGEST_START))[0] == IN_A_ROW < FIRST_STEPS


def test_float32_rounding_never_warns() -> None:
    values = np.full(100, 2e-8)
    values[50:] = 9e-6
    assert alarms(values) == []


def test_it_warns_again_after_it_was_back() -> None:
    values = np.full(100, 0.001)
    values[20:25] = values[60:70] = 0.1
    assert alarms(values) == [23, 63]
    watch = MismatchWatch()
    for step, value in enumerate(values[:25], start=1):
        watch.observe(step, value)
    assert "step 23" in watch.problem
    watch.observe(26, 0.001)
    assert watch.problem == ""


def test_infinite_differences_count_and_missing_ones_do_not() -> None:
    values = np.full(30, 0.001)
    values[15:18] = np.inf
    assert alarms(values) == [18]
    values[15:18] = np.nan
    assert alarms(values) == []


def recorded_rows(steps: int) -> list[dict[str, float]]:
    return [{"step": step, METRIC: 0.001 if step <= 20 else 0.1} for step in range(1, steps + 1)]


@pytest.mark.parametrize(("staleness", "warns"), [(0, True), (1, False)])
def test_the_loop_warns_on_policy(staleness: int, warns: bool) -> None:
    messages: list[str] = []
    trainer: Any = SimpleNamespace(
        rollout=SimpleNamespace(generates=True, staleness=staleness),
        progress=SimpleNamespace(mismatch=MismatchWatch("runs/a")),
        job=SimpleNamespace(recorder=SimpleNamespace(console=SimpleNamespace(message=messages.append))),
    )
    for row in recorded_rows(30):
        OnlineTrainer._watch_mismatch(trainer, int(row["step"]), row)
    assert len(messages) == warns
    assert all("step 23" in text and "isotrain mismatch runs/a" in text for text in messages)


@pytest.mark.parametrize(("staleness", "warns"), [(0, True), (1, False)])
def test_the_page_of_a_run_says_so(tmp_path: Path, staleness: int, warns: bool) -> None:
    rows = "".join(json.dumps(row) + "\n" for row in recorded_rows(30))
    (tmp_path / "metrics.jsonl").write_text(rows)
    (tmp_path / "resolved.json").write_text(json.dumps({"rollout": {"staleness": staleness}}))
    run = RunView(tmp_path)
    run.refresh()
    assert ("isotrain mismatch" in (run.state()["problem"] or "")) == warns
