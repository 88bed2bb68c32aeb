"""Whole runs in which the policy acts in an environment: they learn, replay, and go on exactly."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from online_runs import OnlineRun, online_recipe, run_online

from isotrain.data.record import read_step
from isotrain.observe.metrics import read_metrics
from isotrain.recipe.schema import Recipe
from support import stable_metrics

STEPS = 8

pytestmark = [pytest.mark.ray, pytest.mark.heavy]


def agent(tiny: Path, output: Path, file: str = "", **sections: dict[str, Any]) -> Recipe:
    path = file or f"{tiny / 'environment.py'}:Oracle"
    rollout = {
        "engine": "hf",
        "n": 8,
        "max_tokens": 40,
        "record": True,
        "environment": {"path": path, "max_turns": 2, "max_turn_tokens": 8},
    }
    base: dict[str, dict[str, Any]] = {
        "data": {
            "train": str(tiny / "questions.jsonl"),
            "batch_size": 12,
            "max_length": 64,
            "tokens_per_micro_batch": 4096,
        },
        "reward": {"environment": {}, "function": None, "answer_key": "answer"},
        "trainer": {"steps": STEPS, "save_every": 2},
        "rollout": rollout,
    }
    return online_recipe(tiny, output, **{**base, **sections})


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agents")


@pytest.fixture(scope="module")
def whole(tiny: Path, work: Path) -> Path:
    return run_online(agent(tiny, work / "whole"), work, "whole")


def test_it_learns_to_ask(whole: Path) -> None:
    rows = read_metrics(whole / "metrics.jsonl")
    first, last = rows[0], rows[-1]
    assert first["critic/score/mean"] < 0.2 and last["critic/score/mean"] > 0.4
    assert last["episode/turns/mean"] > 1.8 > first["episode/turns/mean"]
    for row in rows:
        assert row["reward/failures"] == 0.0
        assert row["training/rollout_probs_diff_max"] < 1e-5
    records = read_step(whole / "trajectories", STEPS)
    for trajectory, marks, _ in records:
        assert trajectory.episode is not None
        assert marks.score == pytest.approx(sum(turn.reward for turn in trajectory.episode.turns))
        # The tool's answer is between what the policy wrote, and no part of it.
        if len(trajectory.episode.turns) == 2:
            inner_N = trajectory.mask_N[trajectory.episode.turns[0].end : trajectory.episode.turns[1].start]
            assert len(inner_N) and not inner_N.any()


@pytest.mark.slow
def test_a_replay_is_the_run(tiny: Path, work: Path, whole: Path) -> None:
    recipe = agent(tiny, work / "replayed")
    assert recipe.rollout is not None
    values = {**recipe.rollout.model_dump(), "replay": str(whole), "record": False}
    replay = recipe.model_copy(update={"rollout": type(recipe.rollout).model_validate(values)})
    run = run_online(replay, work, "replayed")
    different = ("rollout/weight_check_diff", "timing_s/", "perf/")
    for one, other in zip(
        read_metrics(whole / "metrics.jsonl"), read_metrics(run / "metrics.jsonl"), strict=True
    ):
        kept = {k: v for k, v in one.items() if not k.startswith(different)}
        assert {k: other[k] for k in kept} == kept


@pytest.mark.slow
def test_a_killed_run_goes_on_exactly(tiny: Path, work: Path, whole: Path) -> None:
    """With episodes under way: nothing of them is left, and the same come again."""
    recipe = agent(tiny, work / "killed")
    first = OnlineRun(recipe, work, "killed-1")
    first.wait_for_steps(4)
    os.kill(first.process.pid, signal.SIGKILL)
    first.wait()
    second = OnlineRun(recipe, work, "killed-2")
    run = second.finish()
    assert "resuming after step" in second.text
    # When an environment answers decides with what a turn shares its batch, and so how its logits round.
    wanted, found = (
        [
            {k: v for k, v in row.items() if not k.startswith("training/rollout")}
            for row in stable_metrics(each)
        ]
        for each in (whole, run)
    )
    assert found == wanted
    for step in range(1, STEPS + 1):
        for one, other in zip(
            read_step(whole / "trajectories", step), read_step(run / "trajectories", step), strict=True
        ):
            assert np.array_equal(one.trajectory.tokens_T, other.trajectory.tokens_T)


CALLER = """
import json
from urllib.request import Request, urlopen

CHARACTERS = {"digits": "0123456789", "capitals": "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}

def run(base_url, api_key, row):
    messages = list(row["prompt"])

    def say():
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        body = json.dumps({"messages": messages}).encode()
        with urlopen(Request(f"{base_url}/chat/completions", body, headers)) as reply:
            return json.load(reply)["choices"][0]["message"]

    messages.append(say())
    if "?" not in messages[-1]["content"]:
        return 0.0
    messages.append({"role": "tool", "content": row["answer"], "tool_call_id": "1"})
    said = say()["content"]
    return 0.5 + 0.5 * sum(letter in CHARACTERS[row["answer"]] for letter in said) / max(1, len(said))
"""


def test_an_agent_that_calls_the_policy_trains_it(tiny: Path, work: Path) -> None:
    (work / "caller.py").write_text(CALLER)
    recipe = agent(tiny, work / "called")
    assert recipe.rollout is not None
    called = {"path": f"{work / 'caller.py'}:run", "max_turns": 2, "max_turn_tokens": 8, "concurrency": 32}
    values = {**recipe.rollout.model_dump(), "environment": None, "agent": called}
    rollout = type(recipe.rollout).model_validate(values)
    run = run_online(recipe.model_copy(update={"rollout": rollout}), work, "called")
    rows = read_metrics(run / "metrics.jsonl")
    assert rows[0]["critic/score/mean"] < 0.2 and rows[-1]["critic/score/mean"] > 0.4
    for row in rows:
        assert row["reward/failures"] == 0.0 and row["episode/sequences/mean"] == 1.0
        assert row["training/rollout_probs_diff_max"] < 1e-5


HOSTILE = """
import os, time

class Oracle:
    async def reset(self, states):
        return {"observation": states["observation"]}

    async def step(self, states):
        number = len(states["action_text"]) % 4
        if number == 1:
            os._exit(1)
        if number == 2:
            time.sleep(600)
        if number == 3:
            raise ValueError("enough")
        return {"rewards": 1.0, "environment_feedback": "", "done": True}
"""


@pytest.mark.slow
def test_hostile_environments_cost_episodes_and_not_the_run(tiny: Path, work: Path) -> None:
    file = work / "hostile.py"
    file.write_text(HOSTILE)
    recipe = agent(tiny, work / "hostile", f"{file}:Oracle", trainer={"steps": 2})
    assert recipe.rollout is not None and recipe.rollout.environment is not None
    limited = recipe.rollout.environment.model_copy(update={"time_limit": 2.0})
    rollout = recipe.rollout.model_copy(update={"environment": limited})
    run = run_online(recipe.model_copy(update={"rollout": rollout}), work, "hostile")
    rows = read_metrics(run / "metrics.jsonl")
    for cause in ("timeouts", "crashes", "errors"):
        assert sum(row[f"reward/{cause}"] for row in rows) > 0, cause
    assert all(row["reward/failures"] < 96 for row in rows)
    failed = [r for r in read_step(run / "trajectories", 1) if r.marks.failure]
    assert {r.marks.detail for r in failed} >= {
        "episode: no reply to 'step' after 2 s",
        "episode: its process ended during 'step'",
        "episode: hostile.py:15: ValueError: enough",
    }
