"""A reward that hangs, raises or exits: what a run counts, what it tells, and when it ends."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import hand_made_step
import pytest
from hand_made_step import make_batch, step_recipe, take_step
from online_runs import OnlineRun, online_recipe

from isotrain.data.record import read_step
from isotrain.errors import RewardError
from isotrain.observe.metrics import read_metrics
from isotrain.trainers.online.metrics import Failures
from isotrain.trainers.online.rollouts import Batch

pytestmark = pytest.mark.ray

N = 2
# Hanging beyond the limit, and ending in two ways, as the row asks for.
FUNCTION = """
import os, time

def score(response, row):
    if row["answer"] == "hang":
        time.sleep(60)
    if row["answer"] == "exit":
        os._exit(3)
    if row["answer"] == "raise":
        raise ValueError("no such judge")
    return float(len(response) % 2)
"""


def write_prompts(path: Path, kinds: list[str]) -> str:
    rows = [{"prompt": f"Please do this: {kind}.", "answer": kind} for kind in kinds]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_failure_is_counted_and_told(tiny: Path, tmp_path: Path) -> None:
    function = tmp_path / "rewards.py"
    function.write_text(FUNCTION)
    recipe = online_recipe(
        tiny,
        tmp_path / "run",
        data={
            "train": write_prompts(tmp_path / "train.jsonl", ["fine", "raise", "exit", "hang"]),
            "validation": write_prompts(tmp_path / "validation.jsonl", ["fine", "raise", "raise"]),
        },
        rollout={"engine": "hf", "n": N, "max_tokens": 4, "record": True, "validation": {"n": 1}},
        reward={"function": {"path": f"{function}:score"}, "timeout": 1.0, "failed_score": -2.0},
        trainer={"steps": 2},
    )
    run = OnlineRun(recipe, tmp_path)
    rows = read_metrics(run.finish() / "metrics.jsonl")
    for row in rows:
        assert {name: row[f"reward/{name}"] for name in ("failures", "timeouts", "crashes", "errors")} == {
            "failures": 3 * N,
            "timeouts": N,
            "crashes": N,
            "errors": N,
        }
        assert row["critic/score/min"] == -2.0 and row["critic/score/max"] >= 0.0
    assert rows[-1]["val/reward_failures"] == 2.0 and "val/reward_failures" not in rows[0]
    for step in (1, 2):
        told = f"warning: step {step}: {3 * N} of {4 * N} responses got no score; the first because of "
        assert told in run.text
    told = "warning: validation after step 2: 2 of 3 responses got no score; the first because of error: "
    assert re.search(re.escape(told) + r"reward\.function: .*ValueError: no such judge", run.text)
    marks = [record.marks for record in read_step(tmp_path / "run" / "trajectories", 1)]
    assert all(bool(m.failure) == bool(m.detail) for m in marks)
    assert sorted({m.failure for m in marks if m.failure}) == ["crash", "error", "timeout"]


def failing_batch(others: Failures) -> Batch:
    batch = make_batch()
    groups = [
        replace(g, scores=tuple(s._replace(failure="error", detail="no judge") for s in g.scores))
        for g in batch.groups
    ]
    return replace(batch, groups=groups, others=others)


def test_the_first_step_of_a_start_needs_one_score(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(others: Failures) -> Any:
        monkeypatch.setattr(hand_made_step, "make_batch", lambda: failing_batch(others))
        return take_step(step_recipe(tiny, tmp_path, "cpu", algorithm={"name": "remax"}))

    dead = Failures(4, {"crash": 4}, "crash: it ended")
    for others, count in ((Failures(), 12), (dead, 16)):
        message = f"none of the first {count} responses got a score; .* because of error: no judge"
        with pytest.raises(RewardError, match=message):
            train(others)
    assert train(Failures(4, {"crash": 3}, "crash: it ended")).metrics["reward/failures"] == 15.0
