"""A run with a slow engine, a slow disk and a slow reward, each in one step, and the same run left alone.

slow_site/ makes the engine and the disk slow.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from online_runs import OnlineRun, online_recipe, run_online

from isotrain.observe.run_directory import RunDirectory
from isotrain.observe.spans import read_spans
from isotrain.recipe.schema import Recipe
from isotrain.tools.profile.analyse import UNACCOUNTED, Profile, profile_of
from support import stable_metrics

# Slow: what takes how long is compared, which other tests beside it would change.
pytestmark = [pytest.mark.ray, pytest.mark.slow]

SITE = Path(__file__).with_name("slow_site")
SOURCE = Path(__file__).parents[3] / "src"
# Of 16 responses a step, in 8 processes: those of step 5 sleep.
SLOW_REWARD = """
import os, time

def score(response, answer):
    if os.environ.get("CALLS"):
        file = os.open(os.environ["CALLS"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(file, b".")
        if 64 < os.fstat(file).st_size <= 80:
            time.sleep(4.0)
        os.close(file)
    return len(set(response)) / 10
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiled")
    (path / "reward.py").write_text(SLOW_REWARD)
    return path


def recipe(tiny: Path, work: Path, name: str, steps: list[int]) -> Recipe:
    function = {"path": f"{work / 'reward.py'}:score", "concurrency": 8, "environment": ["CALLS"]}
    return online_recipe(
        tiny,
        work / name,
        reward={"function": function, "answer_key": "answer"},
        trainer={"steps": 6, "save_every": 1},
        observe={"profile": {"steps": steps}},
    )


@pytest.fixture(scope="module")
def plain(tiny: Path, work: Path) -> Path:
    return run_online(recipe(tiny, work, "plain", []), work, "plain")


@pytest.fixture(scope="module")
def slow(tiny: Path, work: Path) -> RunDirectory:
    variables = {"PYTHONPATH": f"{SITE}:{SOURCE}", "CALLS": str(work / "calls")}
    run = OnlineRun(recipe(tiny, work, "slow", [2, 4, 5, 6]), work, "slow", **variables)
    return RunDirectory(run.finish())


def of_step(run: RunDirectory, step: int) -> Profile:
    return profile_of(run, {step: read_spans(run)[step]})


@pytest.mark.parametrize(("step", "largest"), [(2, "generate"), (4, "save"), (5, "reward")])
def test_what_is_slow_is_named(slow: RunDirectory, step: int, largest: str) -> None:
    found = of_step(slow, step)
    assert found.largest == largest and found.shares[largest] > 0.3, found.lines()


def test_an_honest_step_accuses_neither_reward_nor_disk(slow: RunDirectory) -> None:
    found = of_step(slow, 6)
    assert found.shares["reward"] < 0.3 and found.shares["save"] < 0.3, found.lines()
    assert found.largest not in ("reward", "save", UNACCOUNTED), found.lines()


def test_spans_account_for_the_steps(slow: RunDirectory) -> None:
    for step, spans in read_spans(slow).items():
        found = of_step(slow, step)
        assert found.shares[UNACCOUNTED] < 0.1, found.lines()
        workers = {span.worker for span in spans}
        assert workers == {"controller", "training rank 0", "rollout engine 0", "reward worker 0"}
        assert len(spans) < 60, "workers count, not tokens"


def test_each_profiled_step_has_a_trace_and_no_other(slow: RunDirectory, plain: Path) -> None:
    files = sorted(slow.profile.glob("*/trace-*"))
    assert [file.parent.name for file in files] == [f"step-{step:06d}" for step in (2, 4, 5, 6)]
    text = gzip.decompress(files[0].read_bytes()) if files[0].suffix == ".gz" else files[0].read_bytes()
    names = {event.get("name") for event in json.loads(text)["traceEvents"]}
    assert {"aten::mm", "aten::_log_softmax_backward_data"} & names, "operators of the update"
    assert not RunDirectory(plain).profile.exists()


def test_a_profile_changes_no_number(slow: RunDirectory, plain: Path) -> None:
    assert stable_metrics(slow.path) == stable_metrics(plain)
