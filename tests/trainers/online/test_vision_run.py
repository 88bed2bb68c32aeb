"""Whole online runs on pictures, over Ray: workers and ranks read them from their own stores."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from colour_runs import colour_files, colour_recipe
from online_runs import run_online

from isotrain.data.record import read_step
from isotrain.observe.metrics import read_metrics
from support import run_cli, stable_metrics, write_recipe
from vision_models import coloured

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return colour_files(tmp_path_factory.mktemp("vision"))


def test_engine_and_ranks_see_the_same_pictures(files: Path, tmp_path: Path) -> None:
    run = run_online(colour_recipe(files, tmp_path / "run", 2, algorithm={"name": "rloo"}), tmp_path)
    rows = read_metrics(run / "metrics.jsonl")
    assert max(row["training/rollout_logp_diff_mean"] for row in rows) < 1e-5


def test_a_replay_learns_the_same_and_refuses_an_altered_picture(files: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(files, data)
    recipe = colour_recipe(data, tmp_path / "run", 2, rollout={"record": True})
    run = run_online(recipe, tmp_path)
    recorded = read_step(run / "trajectories", 1)
    assert all(len(record.trajectory.pictures) == 1 for record in recorded)
    assert len({record.trajectory.pictures for record in recorded}) == 4
    (tmp_path / "again").mkdir()
    replay = {"replay": str(run), "record": False}
    again = run_online(colour_recipe(data, tmp_path / "again" / "run", 2, rollout=replay), tmp_path / "again")
    losses = [
        [{k: v for k, v in row.items() if k.startswith(("actor/", "critic/"))} for row in stable_metrics(r)]
        for r in (run, again)
    ]
    assert losses[0] == losses[1]
    (data / "3.png").write_bytes(coloured("green", 56))
    altered = write_recipe(
        colour_recipe(data, tmp_path / "altered", 2, rollout=replay), tmp_path / "altered.yaml"
    )
    done = run_cli("train", str(altered), check=False)
    assert done.returncode != 0 and "other content" in done.stdout + done.stderr
