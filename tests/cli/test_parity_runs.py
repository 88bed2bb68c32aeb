"""`isotrain parity record` and `replay` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from isotrain.cli.main import app
from isotrain.recipe.load import write_resolved
from isotrain.recipe.schema import Recipe
from support import run_cli, stable_metrics, tiny_recipe, write_recipe

pytestmark = pytest.mark.heavy


def parity(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["parity", *map(str, arguments)], env={"COLUMNS": "120"})


def without_engines(run: Path) -> list[dict[str, float]]:
    """Metrics that a replay has as well."""
    engines = ("rollout/weight_check_diff", "val-core/")
    rows = [
        {name: value for name, value in row.items() if not name.startswith(engines)}
        for row in stable_metrics(run)
    ]
    return [row for row in rows if row["step"] > 0]


def online(tiny: Path, output: Path) -> Recipe:
    return tiny_recipe(
        tiny,
        output,
        "cpu",
        data={
            "train": str(tiny / "prompts.jsonl"),
            "validation": str(tiny / "prompts-validation.jsonl"),
            "validation_rows": 2,
            "batch_size": 4,
            "max_length": 64,
            "tokens_per_micro_batch": 256,
        },
        algorithm={"name": "ppo", "mini_batch_size": 2},
        rollout={"engine": "hf", "n": 4, "max_tokens": 6},
        reward={"function": {"path": f"{tiny / 'reward.py'}:score"}, "answer_key": "answer"},
        cluster={"address": "local"},
        trainer={"steps": 2, "validate_first": True},
        observe={"loggers": ["console"]},
    )


@pytest.mark.slow
def test_an_online_run_is_replayed_bit_for_bit(tiny: Path, tmp_path: Path) -> None:
    """On a real Ray, with real responses, in processes of their own; no engine takes part in the replay."""
    recipe = write_recipe(online(tiny, tmp_path / "elsewhere"), tmp_path / "recipe.yaml")
    here, there = tmp_path / "here", tmp_path / "there: 1"
    told = run_cli("parity", "record", str(recipe), f"output={here}").stdout
    assert f"isotrain parity replay {here} --out DIR" in told
    assert len(list((here / "trajectories").glob("step-*.parquet"))) == 2
    done = run_cli("parity", "replay", str(here), "--out", str(there), "trainer.save_every=1")
    assert "no engine, no validation" in done.stdout and "holds" in done.stdout, done.stdout
    assert without_engines(there) == without_engines(here)
    names = {name for row in stable_metrics(there) for name in row}
    assert "actor/pg_loss" in names and not any(name.startswith("val-core/") for name in names)
    assert not (there / "trajectories").exists()


def sft(tiny: Path, output: Path, **sections: Any) -> Path:
    recipe = tiny_recipe(tiny, output, "cpu", trainer={"steps": 3}, **sections)
    return write_recipe(recipe, output.with_suffix(".yaml"))


@pytest.fixture(scope="module")
def here(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded SFT run."""
    path = tmp_path_factory.mktemp("recorded") / "here"
    result = parity("record", sft(tiny, path))
    assert result.exit_code == 0 and f"isotrain parity replay {path}" in result.output, result.output
    return path


@pytest.mark.slow
def test_a_run_is_replayed_with_a_mesh(here: Path, tmp_path: Path) -> None:
    """The recording has layers; a run whose ranks divide them records none, and says so."""
    there = tmp_path / "there"
    mesh = ("device.ranks=2", "device.mesh.context=2")
    done = run_cli("parity", "replay", str(here), "--out", str(there), *mesh, check=False)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    assert "not recorded: the candidate divides its layers over ranks (context 2 (auto))" in done.stdout
    assert not (there / "layer_trace").exists() and len(stable_metrics(there)) == len(stable_metrics(here))


def test_a_supervised_run_needs_no_recording(here: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    assert not (here / "trajectories").exists()
    result = parity("replay", here, "--out", there)
    assert result.exit_code == 0 and "train/loss" in result.output, result.output
    assert stable_metrics(there) == stable_metrics(here)


def test_another_training_is_not_a_replay(here: Path, tiny: Path, tmp_path: Path) -> None:
    """Where the same data lies does not count; other rows and other fields do."""
    moved = tmp_path / "moved.jsonl"
    lines = (tiny / "train.jsonl").read_text().splitlines(keepends=True)
    moved.write_text("".join(lines))
    result = parity("replay", here, "--out", tmp_path / "same", f"data.train={moved}")
    assert result.exit_code == 0, result.output
    moved.write_text("".join(reversed(lines)))
    result = parity("replay", here, "--out", tmp_path / "rows", f"data.train={moved}")
    assert result.exit_code == 1 and "not trained on the same rows: train" in result.output
    result = parity("replay", here, "--out", tmp_path / "lr", "optimizer.lr=1e-3")
    assert result.exit_code == 1 and "optimizer.lr: 0.003 -> 0.001" in result.output


def test_what_cannot_be_replayed(tiny: Path, tmp_path: Path) -> None:
    result = parity("replay", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "is not a run directory" in result.output
    write_resolved(online(tiny, tmp_path), tmp_path / "resolved.json")
    result = parity("replay", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "recorded.json; record a run with" in result.output, result.output
    (tmp_path / "resolved.json").write_text(json.dumps([1]))
    assert "not a resolved recipe" in parity("replay", tmp_path, "--out", tmp_path / "out").output
