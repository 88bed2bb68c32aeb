"""`isotrain mismatch RUN` end to end: `--step`, `--json`, `--report` and `--with-cure` tell what is there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from isotrain.cli.main import app
from isotrain.data.record import Marks, Recorded, step_file, write_trajectories
from isotrain.engine.export import export_run
from isotrain.observe.metrics import MetricsLog
from isotrain.recipe.load import write_resolved
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.hf import HfEngine
from isotrain.trainers.launch import train_supervised
from isotrain.trainers.online.recording import model_digests, trajectories, write_description
from support import tiny_recipe

pytestmark = pytest.mark.heavy

RESPONSES, LENGTH, GIVEN = 8, 24, 4


def mismatch(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["mismatch", *map(str, arguments)])


def strictly(text: str) -> dict:
    """JSON as other programs read it."""

    def refuse(value: str) -> None:
        raise AssertionError(f"{value} is not JSON")

    content: dict = json.loads(text, parse_constant=refuse)
    return content


def write_scores(run: Path, score: Callable[[int], float]) -> None:
    with MetricsLog(run / "metrics.jsonl") as log:
        for step in range(1, 41):
            log.append(step, {"critic/score/mean": score(step)})


@pytest.fixture(scope="session")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second step of a run: a checkpoint of the first, and what the reference engine drew from it.

    The first tokens of each response are an environment's, which have no log-probs.
    """
    work = tmp_path_factory.mktemp("mismatch")
    run = work / "run"
    supervised = tiny_recipe(
        tiny, run, "cpu", optimizer={"lr": 0.05, "warmup_ratio": 0.0}, trainer={"steps": 1, "save_every": 1}
    )
    train_supervised(supervised, "")
    recipe = tiny_recipe(
        tiny,
        run,
        "cpu",
        data={"train": str(tiny / "prompts.jsonl"), "max_length": 64},
        algorithm={"name": "grpo"},
        rollout={"engine": "hf", "n": RESPONSES, "max_tokens": LENGTH},
        reward={"function": {"path": f"{tiny / 'reward.py'}:score"}},
    )
    write_resolved(recipe, run / "resolved.json")
    write_description(recipe, model_digests(recipe, ["model"]), 1)
    trained = export_run(run, work / "trained", 1, False)
    engine = HfEngine(trained, name="e", dtype="float32", device=torch.device("cpu"))
    engine._ends, engine.version = set(), 1
    requests = [
        Request(0, 0, sample, sample, np.arange(5, 12 + sample, dtype=np.int32))
        for sample in range(RESPONSES)
    ]
    written = sorted(engine.generate(requests, Sampling(LENGTH)), key=lambda t: t.sample)
    turns = [
        replace(
            t,
            mask_N=np.arange(LENGTH) >= GIVEN,
            logp_N=np.where(np.arange(LENGTH) >= GIVEN, t.logp_N, 0).astype(np.float32),
        )
        for t in written
    ]
    marks = Marks(0.0, {}, None, "test", None, 0.0)
    write_trajectories(step_file(trajectories(run), 2, 0), [Recorded(t, marks, None) for t in turns])
    (run / "metrics.jsonl").unlink()
    write_scores(run, lambda step: 0.5 + 0.01 * (step % 3))
    return run


def with_scores(run: Path, path: Path, score: Callable[[int], float]) -> Path:
    path.mkdir()
    shutil.copy(run / "resolved.json", path)
    write_scores(path, score)
    return path


def test_the_step_is_explained_with_its_own_weights(run: Path, tmp_path: Path) -> None:
    cure = with_scores(run, tmp_path / "cure", lambda step: 0.5 + 0.01 * (step % 3))
    report = tmp_path / "report"
    result = mismatch(run, "--step", "2", "--with-cure", cure, "--json", "--report", report)
    told = strictly(result.stdout)
    assert result.exit_code == 0 and told["outcome"] == "explained", told
    assert told["nats_per_token"] < 1e-5 and told["engine"] == "hf"
    assert told["tokens"] == RESPONSES * (LENGTH - GIVEN)
    # All are equally long: there is no correlation to tell, and no number that JSON does not have.
    assert told["effect"]["length"]["coefficient"] == "nan"
    assert told["with_cure"]["outcome"]["verdict"] == "equivalent"
    assert strictly((report / "mismatch.json").read_text()) == told
    page = (report / "mismatch.md").read_text()
    assert told["sentence"] in page and "With and without the cure:" in page


def test_other_weights_and_a_cure_that_changed_the_outcome_are_told(
    run: Path, tiny: Path, tmp_path: Path
) -> None:
    cure = with_scores(run, tmp_path / "cure", lambda step: 0.9 + 0.01 * (step % 3))
    result = mismatch(run, "--step", "2", "--model", tiny / "model", "--with-cure", cure)
    assert result.exit_code == 3, result.output
    assert "does not repeat the recorded log-probs" in result.stdout
    assert "recorded log-probs" in result.stdout.splitlines()[2]  # has the largest share
    assert "Outcome: different" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--step", "1"), "step-000001"),
        (("--step", "5"), "steps there: 1"),
        (("--step", "2", "--temperature", "0.5"), "--temperature"),
        (("--step", "2", "--with-cure", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_examined_ends_with_2(run: Path, arguments: tuple[str, ...], words: str) -> None:
    result = mismatch(run, *arguments)
    assert result.exit_code == 2 and words in result.stderr, result.output


def test_a_model_has_no_steps(tiny: Path) -> None:
    result = mismatch(tiny / "model", "--engine", "hf", "--step", "2")
    assert result.exit_code == 2 and "--step" in result.stderr
