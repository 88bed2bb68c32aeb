"""`isotrain parity sampler` on responses that the reference engine drew as asked, or not as stated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from online_runs import online_recipe
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from isotrain.cli.main import app
from isotrain.data.record import Marks, Recorded, step_file, write_trajectories
from isotrain.errors import DataError
from isotrain.recipe.load import write_resolved
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.hf import HfEngine
from isotrain.trainers.online.drawn_tokens import drawn_tokens, read_recorded_step
from isotrain.trainers.online.recording import model_digests, trajectories, write_description

pytestmark = pytest.mark.heavy

MARKS = Marks(0.0, {}, None, "test", None, 0.0)
RESPONSES, LENGTH = 256, 32


@pytest.fixture(scope="module")
def sharp(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with probabilities as unlike as a trained one's; at random they are nearly equal."""
    path = tmp_path_factory.mktemp("sharp") / "model"
    model: Any = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(6.0)
    model.save_pretrained(path)
    return path


def recorded(tiny: Path, model: Path, run: Path, **rollout: Any) -> Path:
    """A run directory as `rollout.record` leaves it, with the first step of the reference engine."""
    recipe = online_recipe(tiny, run, model={"path": str(model)}, rollout=rollout)
    run.mkdir()
    write_resolved(recipe, run / "resolved.json")
    write_description(recipe, model_digests(recipe, ["model"]), 1)
    engine = HfEngine(model, name="e", dtype="float32", device=torch.device("cpu"))
    engine._ends = set()
    sampling = Sampling(max_tokens=LENGTH, **{key: rollout[key] for key in rollout if key != "n"})
    requests = [
        Request(row=0, prompt_index=0, sample=sample, seed=sample, prompt_P=np.arange(5, 12, dtype=np.int32))
        for sample in range(RESPONSES)
    ]
    written = sorted(engine.generate(requests, sampling), key=lambda trajectory: trajectory.sample)
    records = [Recorded(trajectory, MARKS, None) for trajectory in written]
    write_trajectories(step_file(trajectories(run), 1, 0), records)
    return run


def sampler(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["parity", "sampler", *map(str, arguments)], env={"COLUMNS": "200"})


def test_finds_another_temperature(tiny: Path, sharp: Path, tmp_path: Path) -> None:
    run = recorded(tiny, sharp, tmp_path / "run", temperature=1.0)
    result = sampler(run, "--positions", "8192")
    assert result.exit_code == 0 and "drawn as asked" in result.output, result.output
    result = sampler(run, "--positions", "8192", "--temperature", "1.05", "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 1 and told["verdict"] == "different" and told["positions"] == 8192
    assert told["temperature"]["low"] < 1.0 < told["temperature"]["high"] < 1.05, told
    result = sampler(run, "--positions", "50")
    assert result.exit_code == 3, result.output


def test_finds_draws_beyond_top_p(tiny: Path, sharp: Path, tmp_path: Path) -> None:
    run = recorded(tiny, sharp, tmp_path / "run", temperature=1.0, top_p=0.9, top_k=20)
    result = sampler(run, "--positions", "8192")
    assert result.exit_code != 1 and "top-p, last token" in result.output, result.output
    result = sampler(run, "--positions", "8192", "--top-p", "0.8")
    assert result.exit_code == 1 and "draws beyond top-p" in result.output, result.output
    result = sampler(run, "--positions", "8192", "--top-p", "1.0")
    assert result.exit_code == 1, result.output


def test_logits_are_those_that_tokens_were_drawn_from(tiny: Path, sharp: Path, tmp_path: Path) -> None:
    run = recorded(tiny, sharp, tmp_path / "run", temperature=1.0)
    step = read_recorded_step(run)
    own_Q = np.concatenate([t.logp_N for t in step.trajectories])[:100]
    found = []
    for logits_QV, tokens_Q in drawn_tokens(step, 100):
        logp_QV = logits_QV - np.log(np.exp(logits_QV).sum(1, keepdims=True))
        found.append(np.take_along_axis(logp_QV, tokens_Q[:, None], 1)[:, 0])
    np.testing.assert_allclose(np.concatenate(found), own_Q, atol=2e-4)


def test_what_is_refused(tiny: Path, sharp: Path, tmp_path: Path) -> None:
    run = recorded(tiny, sharp, tmp_path / "run", temperature=1.0)
    with pytest.raises(DataError, match="isotrain export"):
        read_recorded_step(run, step=2)
    with pytest.raises(DataError, match=r"cannot be read|missing"):
        read_recorded_step(run, step=2, model=sharp)
    config = (sharp / "config.json").read_text()
    (sharp / "config.json").write_text(config + "\n")
    try:
        with pytest.raises(DataError, match="digests differ"):
            read_recorded_step(run)
    finally:
        (sharp / "config.json").write_text(config)
    result = sampler(run, "--model", sharp, "--temperature", "0")
    assert result.exit_code == 2 and "temperature" in result.output
