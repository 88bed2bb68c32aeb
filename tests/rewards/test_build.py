"""The recipe's rewards, weighted and added, with failures counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from children import write_functions
from isotrain.errors import RewardError
from isotrain.recipe.online import RewardSection
from isotrain.rewards.base import RewardInput, Scored, Scorer
from isotrain.rewards.build import build_scorer, reward_source


@contextmanager
def scorer(**reward: Any) -> Iterator[Scorer]:
    section = RewardSection.model_validate(reward)
    built = build_scorer(section, reward_source(section))
    try:
        yield built
    finally:
        built.close()


def test_weighs_gsm8k_and_scores_failures() -> None:
    with scorer(
        gsm8k={"method": "flexible", "format_score": 0.25, "weight": 2.0}, failed_score=-1.0
    ) as rewards:
        rewards.start()
        items = [
            RewardInput("it is 12", "12"),
            RewardInput("it is 13", 12),
            RewardInput("", 12),
            RewardInput("it is 12", None),
        ]
        scored = rewards.score(items)
    assert scored[:3] == [
        Scored(2.0, {"gsm8k": 1.0}),
        Scored(0.5, {"gsm8k": 0.25}),
        Scored(0.0, {"gsm8k": 0.0}),
    ]
    assert (scored[3].score, scored[3].failure) == (-1.0, "error")


def test_a_right_answer_that_no_answer_can_equal_is_told() -> None:
    with scorer(gsm8k={}) as rewards:
        worked, plain = rewards.score(
            [RewardInput("#### 72", "48 / 2 = 24\n" * 50 + "#### 72"), RewardInput("#### 72", 72.0)]
        )
    assert (worked.score, worked.failure) == (0.0, "error")
    assert worked.detail.endswith("#### 72' is not a plain number; check reward.answer_key")
    assert plain == Scored(1.0, {"gsm8k": 1.0})


def test_a_function_sees_only_the_keys_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "MY_JUDGE_KEY", "MY_SETTING"):
        monkeypatch.setenv(name, "value")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "rewards.py"
    path.write_text(
        "import os, subprocess\n"
        "def f(response):\n"
        "    ours, below = response in os.environ, f'{response}=' in subprocess.getoutput('env')\n"
        "    return float(ours) + float(below)\n"
    )
    names = ["WANDB_API_KEY", "HF_TOKEN", "MY_SETTING", "MY_JUDGE_KEY", "OMP_NUM_THREADS", "PATH"]
    with scorer(function={"path": f"{path}:f", "environment": ["MY_JUDGE_KEY", "NOT_SET"]}) as rewards:
        scored = rewards.score([RewardInput(name, "") for name in names])
    assert [one.score for one in scored] == [0.0, 0.0, 0.0, 2.0, 2.0, 2.0]


@pytest.mark.heavy
def test_all_parts_are_weighted_and_a_failed_one_decides(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    source = (
        "def f(response, row):\n    return {'score': len(response) / row['n'], 'length': len(response)}\n"
    )
    path.write_text(source)
    reward = {
        "gsm8k": {"weight": 1.0},
        "math": {"weight": 0.5},
        "function": {"path": f"{path}:f", "weight": -0.25},
        "failed_score": -3.0,
        "timeout": 60.0,
    }
    with scorer(**reward) as rewards:
        rewards.start()
        good, half, bad = rewards.score(
            [
                RewardInput("#### 12", "12", {"n": 7}),
                RewardInput("so it is 12", "12", {"n": 11}),
                RewardInput("#### 12", "12", {"n": 0}),
            ]
        )
    assert good == Scored(1.25, {"gsm8k": 1.0, "math": 1.0, "function": 1.0, "function/length": 7.0})
    assert half == Scored(0.25, {"gsm8k": 0.0, "math": 1.0, "function": 1.0, "function/length": 11.0})
    assert (bad.score, bad.failure, bad.parts) == (-3.0, "error", {"gsm8k": 1.0, "math": 1.0})
    assert bad.detail == "reward.function: rewards.py:2: ZeroDivisionError: division by zero"


def test_failures_are_told(tmp_path: Path) -> None:
    path = write_functions(tmp_path)
    with scorer(function={"path": f"{path}:score"}, timeout=1.0) as rewards:
        scored = rewards.score([RewardInput(text, "") for text in ("", "sleep", "exit", "raise", "nan", "")])
    assert [result.score for result in scored] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert [result.failure for result in scored] == [None, "timeout", "crash", "error", "error", None]


def test_concurrency_is_the_recipes(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(
        "import asyncio\nrunning = 0\n"
        "async def f(response):\n    global running\n    running += 1\n    now = running\n"
        "    await asyncio.sleep(0.05)\n    running -= 1\n    return now\n"
    )
    with scorer(function={"path": f"{path}:f", "concurrency": 3}) as rewards:
        assert max(result.score for result in rewards.score([RewardInput("", "")] * 10)) == 3.0


def test_memory_and_start_of_a_function_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def f(response):\n    return len(bytearray(int(response)))\n")
    with scorer(function={"path": f"{path}:f", "memory_gb": 1.0}) as rewards:
        small, large = rewards.score([RewardInput("10", ""), RewardInput(str(2 << 30), "")])
    assert (small.score, large.failure) == (10.0, "error") and "MemoryError" in large.detail
    path.write_text("import time\ntime.sleep(1000)\n")
    with (
        scorer(function={"path": f"{path}:f", "start_timeout": 0.5}) as rewards,
        pytest.raises(RewardError, match=r"not ready after 0\.5 s"),
    ):
        rewards.start()


def test_a_wrong_path_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(RewardError, match=r"no file rewards\.py"),
        scorer(function={"path": "rewards.py:f"}),
    ):
        pass


def test_a_reward_model_alone_leaves_nothing_to_do_here() -> None:
    with scorer(model={"path": "judge"}) as rewards:
        rewards.start()
        assert rewards.score([RewardInput("a", "b")]) == [Scored(0.0)]


def test_a_sum_that_no_float32_holds_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def f(response):\n    return float(response)\n")
    with scorer(function={"path": f"{path}:f", "weight": 4.0}, failed_score=-1.0) as rewards:
        rewards.start()
        fine, *others = rewards.score(
            [RewardInput(text, None) for text in ("8e37", "1e38", "-1e38", "1e308")]
        )
    assert fine.score == 4.0 * 8e37 and fine.failure is None
    for other in others:
        assert (other.score, other.failure) == (-1.0, "error") and "out of range" in other.detail
