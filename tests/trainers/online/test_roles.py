"""Runs with more than a policy: reward models, critics, controllers, draws that are replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from online_runs import drawn, online_recipe, resumed, run_online
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from isotrain.data.prepare import tiny_reward
from isotrain.data.record import Recorded, read_trajectories
from isotrain.data.trajectory import Trajectory
from isotrain.observe.metrics import read_metrics
from isotrain.recipe.schema import Recipe
from support import stable_metrics

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def reward_model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a sequence classifier with a head that we know."""
    path = tmp_path_factory.mktemp("judge")
    model: Any = AutoModelForSequenceClassification.from_pretrained(tiny / "model", num_labels=1)
    with torch.no_grad():
        model.score.weight.copy_(torch.linspace(-0.3, 0.3, 64)[None])
    model.save_pretrained(path)
    return path


def preference(reward_model: Path, records: list[Recorded]) -> list[float]:
    model: Any = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    # Without padding none is to be looked for: a response may end with that very token.
    model.config.pad_token_id = None
    with torch.no_grad():
        return [model(torch.tensor([conversation(r.trajectory)])).logits.item() for r in records]


def conversation(trajectory: Trajectory) -> list[int]:
    """As the chat template writes it: the response, the end of the turn, a new line."""
    tokens = trajectory.tokens_T.tolist()
    return [*(tokens if tokens[-1] == 2 else [*tokens, 2]), 201]


def counted(tiny: Path, records: list[Recorded]) -> list[float]:
    """What the tiny task's own function says."""
    rows = [json.loads(line) for line in (tiny / "prompts.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    texts = [tokenizer.decode(r.trajectory.response_N, skip_special_tokens=True) for r in records]
    return [
        tiny_reward.score(text, rows[record.trajectory.row]["answer"])
        for text, record in zip(texts, records, strict=True)
    ]


@pytest.mark.parametrize(("ranks", "weights"), [(1, (0.0, 1.0)), (2, (0.5, 2.0))])
def test_scores_are_those_of_transformers(
    tiny: Path, reward_model: Path, tmp_path: Path, ranks: int, weights: tuple[float, float]
) -> None:
    of_function, of_model = weights
    function = {"path": f"{tiny / 'reward.py'}:score", "weight": of_function} if of_function else None
    recipe = online_recipe(
        tiny,
        tmp_path / "run",
        device={"type": "cpu", "ranks": ranks},
        rollout={"engine": "hf", "n": 4, "max_tokens": 6, "record": True},
        reward={"function": function, "model": {"path": str(reward_model), "weight": of_model}},
        trainer={"steps": 3},
    )
    run = run_online(recipe, tmp_path, timeout=900)
    rows = read_metrics(run / "metrics.jsonl")
    assert len(rows) == 3
    for number, row in enumerate(rows, start=1):
        files = sorted((run / "trajectories").glob(f"step-{number:06d}-*.parquet"))
        assert len(files) == ranks
        records = [record for file in files for record in read_trajectories(file)]
        assert len(records) == 16
        wanted = of_model * np.array(preference(reward_model, records)) + of_function * np.array(
            counted(tiny, records)
        )
        assert np.std(wanted) > 0.01
        np.testing.assert_allclose([record.marks.reward for record in records], wanted, rtol=0, atol=1e-5)
        assert row["critic/score/mean"] == pytest.approx(wanted.mean(), abs=1e-5)
        assert row["critic/score/max"] == pytest.approx(wanted.max(), abs=1e-5)
        assert row["reward/failures"] == 0.0


CASES: dict[str, dict[str, Any]] = {
    "adaptive KL": {
        "name": "grpo",
        "kl": {"place": "reward", "coefficient": 0.05, "controller": "adaptive", "horizon": 50},
    },
    "critic": {"name": "ppo", "critic": {"lr": 1e-2}, "mini_batch_size": 2, "ppo_epochs": 2},
    "dynamic sampling": {"name": "grpo", "dynamic_sampling": {"max_attempts": 3}},
}


def case(tiny: Path, output: Path, name: str) -> Recipe:
    return online_recipe(
        tiny,
        output,
        algorithm=CASES[name],
        rollout={"engine": "hf", "n": 2, "max_tokens": 4, "record": True},
        trainer={"steps": 6, "save_every": 1},
    )


@pytest.mark.parametrize("name", list(CASES))
def test_a_killed_run_goes_on_exactly(tiny: Path, tmp_path: Path, name: str) -> None:
    whole = run_online(case(tiny, tmp_path / "whole", name), tmp_path, "whole", timeout=900)
    run = resumed(case(tiny, tmp_path / "killed", name), tmp_path, name, after=3, timeout=900)
    assert stable_metrics(run) == stable_metrics(whole)
    assert drawn(run) == drawn(whole)
    CHECKS[name](stable_metrics(whole), drawn(whole))


Rows, Draws = list[dict[str, float]], list[list[tuple[int, int, int]]]


def check_coefficient(rows: Rows, draws: Draws) -> None:
    """At most 20 % in 50 trajectories, and 8 of them in each step."""
    coefficients = [row["actor/kl_coef"] for row in rows]
    assert coefficients[0] == 0.05 and len(set(coefficients)) == len(rows)
    for row, before, after in zip(rows[:-1], coefficients[:-1], coefficients[1:], strict=True):
        error = min(max(row["actor/reward_kl_penalty"] / 0.1 - 1, -0.2), 0.2)
        assert after == pytest.approx(before * (1 + error * 8 / 50), rel=1e-9)


def check_critic(rows: Rows, draws: Draws) -> None:
    assert rows[0]["critic/values/max"] == rows[0]["critic/values/min"] == 0.0
    assert all(row["critic/values/max"] > row["critic/values/min"] for row in rows[1:])
    assert len({row["critic/vf_loss"] for row in rows}) == len(rows)


def check_replaced(rows: Rows, draws: Draws) -> None:
    """Replaced draws are not learnt from, those in their prompt_index are the next ones, and none comes
    twice."""
    assert sum(row["rollout/resampled"] for row in rows) > 0
    taken = 0
    for row, step in zip(rows, draws, strict=True):
        indices = sorted({prompt_index for prompt_index, _, _ in step})
        assert len(step) == 8 and len(indices) == 4
        assert indices[0] >= taken
        taken += 4 + int(row["rollout/resampled"])
        assert indices[-1] < taken
    rows_of: dict[int, set[int]] = {}
    for step in draws:
        for prompt_index, row_number, _ in step:
            rows_of.setdefault(prompt_index, set()).add(row_number)
    assert all(len(numbers) == 1 for numbers in rows_of.values())


CHECKS = {"adaptive KL": check_coefficient, "critic": check_critic, "dynamic sampling": check_replaced}
