from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isotrain.tools.parity.levels.anchors import anchors
from isotrain.tools.parity.read.runs import read_isotrain_run
from isotrain.tools.parity.run import RunLog, Series
from isotrain.trainers.launch import train_supervised
from preference_runs import preference_recipe, write_preferences
from traced_runs import layers_level

pytestmark = pytest.mark.heavy


def run_of(metrics: dict[str, float], algorithm: dict[str, Any], **recipe: Any) -> RunLog:
    series = {name: Series(np.array([1, 2]), np.array([value, 7.0])) for name, value in metrics.items()}
    sections = {"model": {"dtype": "float32"}, "algorithm": algorithm, **recipe}
    return RunLog(Path("run"), "isotrain run", series, sections)


def passed(run: RunLog) -> dict[str, bool | None]:
    return {check.name.removesuffix(" at step 1"): check.passed for check in anchors(run)}


@pytest.fixture(autouse=True)
def quickly() -> Iterator[None]:
    """Matrices this small are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({"name": "dpo"}, math.log(2)),
        ({"name": "dpo", "loss": "ipo", "beta": 0.2}, 1 / (4 * 0.2**2)),
        ({"name": "kto"}, 0.5),
    ],
)
def test_first_steps_of_real_runs(
    tiny: Path, tmp_path: Path, device_type: str, algorithm: dict[str, Any], expected: float
) -> None:
    rows = write_preferences(tmp_path, count=16)
    recipe = preference_recipe(
        algorithm["name"],
        tiny,
        rows,
        tmp_path / "run",
        device_type,
        algorithm={**algorithm, "reference": "live"},
        trainer={"steps": 1},
        observe={"layer_trace": 1, "loggers": []},
    )
    train_supervised(recipe, "")
    run = read_isotrain_run(tmp_path / "run")
    assert run.metrics["train/loss"].values_S[0] == pytest.approx(expected, rel=1e-4)
    found = anchors(run)
    assert len(found) == 2 and all(check.passed for check in found)
    assert found[0].name == "train/loss at step 1" and found[0].value < found[0].limit / 4
    # They are part of the level of forced steps.
    level = layers_level(tmp_path / "run", tmp_path / "run", dtype="float32")
    assert level.state == "same" and level.checks[-2:] == found
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "run", other)
    row = json.loads((other / "metrics.jsonl").read_text())
    (other / "metrics.jsonl").write_text(json.dumps({**row, "train/loss": expected * 1.1}) + "\n")
    missed = layers_level(tmp_path / "run", other, dtype="float32")
    assert missed.state == "different" and "by definition: train/loss at step 1" in missed.words
    # What the reference misses as well is no difference.
    assert layers_level(other, other, dtype="float32").state == "same"


def test_a_reference_that_is_not_the_policy() -> None:
    algorithm = {"name": "dpo", "loss": "sigmoid", "beta": None}
    right = {"train/loss": math.log(2), "train/margin": 0.0}
    assert passed(run_of(right, algorithm)) == {"train/loss": True, "train/margin": True}
    wrong = {"train/loss": 0.6925, "train/margin": 1e-3}
    assert passed(run_of(wrong, algorithm)) == {"train/loss": False, "train/margin": False}
    assert passed(run_of({"train/loss": math.nan}, algorithm)) == {"train/loss": False}
    narrow = run_of(wrong, algorithm, model={"dtype": "bfloat16"})
    assert passed(narrow) == {"train/loss": True, "train/margin": True}


def test_unequal_weights_of_kto_have_no_anchor() -> None:
    metrics = {"train/loss": 1.0, "train/kl": 0.0}
    equal = {"name": "kto", "beta": 0.1, "desirable_weight": 2.0, "undesirable_weight": 2.0}
    assert passed(run_of(metrics, equal)) == {"train/loss": True, "train/kl": True}
    # Of unlike weights the loss depends on how many responses are desirable.
    assert passed(run_of(metrics, {**equal, "desirable_weight": 0.0})) == {"train/kl": True}


ONLINE = {"name": "grpo", "ppo_epochs": 1, "mini_batch_size": None}
SAMPLED = {"data": {"batch_size": 4}, "rollout": {"n": 4}}


def test_one_update_is_on_policy() -> None:
    metrics = {"actor/ppo_kl": 0.0, "actor/pg_clipfrac": 0.0, "actor/kl_loss": 0.0}
    assert set(passed(run_of(metrics, ONLINE, **SAMPLED)).values()) == {True}
    assert passed(run_of({"actor/ppo_kl": 1e-9}, ONLINE, **SAMPLED)) == {"actor/ppo_kl": False}
    assert passed(run_of({"actor/kl_loss": 1e-4}, ONLINE, **SAMPLED)) == {"actor/kl_loss": False}
    # The mean over several updates is not known before.
    for several in ({"ppo_epochs": 2}, {"mini_batch_size": 2}):
        assert not anchors(run_of(metrics, {**ONLINE, **several}, **SAMPLED))
    assert anchors(run_of(metrics, {**ONLINE, "mini_batch_size": 4}, **SAMPLED))
    penalty = run_of({"actor/reward_kl_penalty": 0.1}, {**ONLINE, "ppo_epochs": 2}, **SAMPLED)
    assert passed(penalty) == {"actor/reward_kl_penalty": False}


def test_advantages_of_a_group_have_mean_zero() -> None:
    metrics = {"critic/advantages/mean": 0.1, "response_length/min": 6.0, "response_length/max": 6.0}
    assert passed(run_of(metrics, ONLINE, **SAMPLED)) == {"critic/advantages/mean": False}
    assert passed(run_of({**metrics, "critic/advantages/mean": 1e-8}, ONLINE, **SAMPLED)) == {
        "critic/advantages/mean": True
    }
    # Over tokens of responses of unlike lengths, and alone in a group, the mean is not 0.
    assert not anchors(run_of({**metrics, "response_length/max": 7.0}, ONLINE, **SAMPLED))
    assert not anchors(run_of(metrics, ONLINE, data={}, rollout={"n": 1}))
    whitened = {**ONLINE, "name": "reinforce++"}
    assert passed(run_of({"critic/advantages/mean": 0.01}, whitened, **SAMPLED)) == {
        "critic/advantages/mean": False
    }


@pytest.mark.parametrize(
    "recipe",
    [
        None,
        {},
        {"model": "x", "algorithm": {"name": "dpo"}},
        {"model": {"dtype": []}, "algorithm": {"name": "kto"}},
        {"model": {"dtype": "float32"}, "algorithm": {"name": "sft"}},
        {"model": {"dtype": "float32"}, "algorithm": {"name": "dpo", "loss": "simpo"}},
    ],
)
def test_nothing_is_known_of_other_runs(recipe: Any) -> None:
    loss = {"train/loss": Series(np.array([1]), np.array([3.0]))}
    assert not anchors(RunLog(Path("run"), "isotrain run", loss, recipe))


def test_accepts_strange_numbers_of_a_recipe() -> None:
    for beta in (0, -1, "x", True, [0.1]):
        run = run_of({"train/loss": 25.0}, {"name": "dpo", "loss": "ipo", "beta": beta})
        assert len(anchors(run)) == 1
