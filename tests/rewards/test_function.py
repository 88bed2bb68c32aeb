"""A user's function is found, called by its parameters' names, and its result is read with care."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from children import write_functions
from isotrain.process.pool import Pool
from isotrain.rewards.base import RewardInput
from isotrain.rewards.function import REWARD_CALLS, read_result, read_source


def run(path: str, items: list[RewardInput]) -> list[tuple[float, dict[str, float], str]]:
    setup = {"kind": "function", "path": path, "source": read_source(path)}
    pool = Pool(REWARD_CALLS, setup, name="reward.function", timeout=20.0)
    try:
        results = [future.result(60) for future in pool.submit(items)]
    finally:
        pool.close()
    return [(result.score, result.parts, result.detail) for result in results]


def test_runs_a_file_written_for_verl(tmp_path: Path) -> None:
    row = {"data_source": "gsm8k", "extra_info": {"index": 7}, "prompt": []}
    found = run(
        f"{write_functions(tmp_path)}:compute_score",
        [RewardInput("12", "12", row), RewardInput("13", "12", row)],
    )
    assert found == [(1.0, {"acc": 1.0, "index": 7.0}, ""), (0.0, {"acc": 1.0, "index": 7.0}, "")]


def test_passes_our_parameters_and_keeps_defaults(tmp_path: Path) -> None:
    row = {"n": np.int64(5), "array": np.arange(2)}
    assert run(f"{write_functions(tmp_path)}:everything", [RewardInput("abc", 4, row)]) == [(24.0, {}, "")]


def test_imports_beside_the_file_and_a_misleading_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "helper.py").write_text("VALUE = 0.25\n")
    (tmp_path / "beside.py").write_text("VALUE = 0.5\n")
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')\n")
    source = "import beside, helper\ndef f(answer):\n    return helper.VALUE + beside.VALUE\n"
    (tmp_path / "own" / "rewards.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    assert run("own/rewards.py:f", [RewardInput("", "", {})]) == [(0.75, {}, "")]


def test_runs_an_object_with_an_async_call(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(
        "class Judge:\n    async def __call__(self, response):\n        return len(response)\n\n"
        "judge = Judge()\n"
    )
    assert run(f"{path}:judge", [RewardInput("abc", "", {})]) == [(3.0, {}, "")]


@pytest.mark.parametrize(
    ("name", "score", "parts"),
    [("short", 0.997, {}), ("graded", 1.0, {"length": 8.0}), ("llm_judge", 1.0, {})],
)
def test_the_examples_of_the_guide(tmp_path: Path, name: str, score: float, parts: dict[str, float]) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    path = tmp_path / "rewards.py"
    path.write_text("\n".join(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)), encoding="utf-8")
    ((found, found_parts, detail),) = run(f"{path}:{name}", [RewardInput("it is 12", "12")])
    assert (found, found_parts, detail) == (pytest.approx(score), parts, "")


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (1, 1.0),
        (False, 0.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (Decimal("0.5"), 0.5),
        ({"score": np.int64(2)}, 2.0),
    ],
)
def test_reads_numbers(returned: object, score: float) -> None:
    assert read_result(returned) == (score, {})


@pytest.mark.parametrize(
    "returned",
    [
        "1",
        b"1",
        np.str_("1"),
        None,
        [1.0],
        (1.0,),
        1j,
        math.nan,
        -math.inf,
        10**400,
        torch.zeros(2),
        {},
        {"score": "1"},
    ],
)
def test_what_is_no_score(returned: object) -> None:
    with pytest.raises(ValueError, match="the function returned"):
        read_result(returned)


def test_reads_parts_that_are_finite_numbers() -> None:
    returned = {"score": 1, "a": 2, "b": "text", "c": math.inf, 4: 5, "d" * 100: 1.5, "e": None}
    assert read_result(returned) == (1.0, {"a": 2.0, "d" * 64: 1.5})
    with pytest.raises(ValueError, match="100 numbers"):
        read_result({"score": 1.0, **{f"k{n}": n for n in range(100)}})
