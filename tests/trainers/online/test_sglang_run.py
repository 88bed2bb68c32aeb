"""Whole runs over a real SGLang server, on the CPU."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from online_runs import OnlineRun, online_recipe
from test_learning import as_shipped, check, rewards_of

from isotrain.observe.metrics import read_metrics
from isotrain.recipe.schema import Recipe
from support import python_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]


def over_sglang(recipe: Recipe) -> Recipe:
    content = recipe.model_dump(mode="json", exclude_unset=True)
    content["rollout"] |= {"engine": "sglang", "server_python": python_of("sglang")}
    return Recipe.model_validate(content)


def servers(run: OnlineRun) -> list[psutil.Process]:
    """Processes that were started as `sglang.launch_server`; what those start has other names."""
    found = psutil.Process(run.process.pid).children(recursive=True)
    return [process for process in found if "sglang.launch_server" in process.cmdline()]


def test_the_shipped_recipe_learns_with_sglang(tmp_path: Path) -> None:
    started = time.monotonic()
    run = OnlineRun(over_sglang(as_shipped(tmp_path)), tmp_path).finish(1700)
    print(f"{time.monotonic() - started:.0f} s")
    check(rewards_of(run))


@pytest.mark.parametrize("lora", [False, True])
def test_a_dead_server_is_replaced(tiny: Path, tmp_path: Path, lora: bool) -> None:
    """Sleep, wake and an update in each step; the weights of adapters arrive merged."""
    sections = {"model": {"lora": {"rank": 4, "alpha": 8}}} if lora else {}
    recipe = over_sglang(online_recipe(tiny, tmp_path / "run", trainer={"steps": 8}, **sections))
    run = OnlineRun(recipe, tmp_path)
    try:
        run.wait_for_steps(2, 900)
        (server,) = servers(run)
        os.kill(server.pid, signal.SIGKILL)
        output = run.finish(1200)
    finally:
        run.end()
    assert "warning: rollout engine 0" in run.text and "a new worker replaces it" in run.text
    rows = read_metrics(output / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert max(row["rollout/weight_check_diff"] for row in rows) < 1e-4
    assert max(row["training/rollout_logp_diff_mean"] for row in rows) < 1e-4
    assert not server.is_running()
