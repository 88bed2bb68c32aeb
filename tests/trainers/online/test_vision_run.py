"""Whole online runs on pictures, over Ray: workers and ranks read them from their own stores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from online_runs import online_recipe, run_online

from isotrain.data.prepare import tiny_reward
from isotrain.data.record import read_step
from isotrain.observe.metrics import read_metrics
from isotrain.recipe.schema import Recipe
from support import run_cli, stable_metrics, write_recipe
from vision_models import coloured, make_vlm

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture's colour says which characters are wanted: red for digits, blue for capitals."""
    out = tmp_path_factory.mktemp("vision")
    make_vlm(out / "model", "qwen2_5_vl")
    shutil.copy(tiny_reward.__file__, out / "reward.py")
    rows = []
    for number in range(32):
        colour, answer = (("red", "digits"), ("blue", "capitals"))[number % 2]
        (out / f"{number}.png").write_bytes(coloured(colour, 28 + 28 * (number // 2 % 2)))
        prompt = [{"role": "user", "content": "<image>?"}]
        rows.append({"prompt": prompt, "images": [f"{number}.png"], "answer": answer})
    (out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def recipe_of(files: Path, out: Path, steps: int, **sections: dict[str, Any]) -> Recipe:
    base: dict[str, Any] = {
        "data": {
            "train": str(files / "prompts.jsonl"),
            "image_key": "images",
            "batch_size": 16,
            "max_length": 64,
            "tokens_per_micro_batch": 2048,
        },
        "rollout": {"n": 8, "max_tokens": 6},
        "optimizer": {"lr": 3e-3},
        "trainer": {"steps": steps},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return online_recipe(files, out, "cpu", **base)


def test_engine_and_ranks_see_the_same_pictures(files: Path, tmp_path: Path) -> None:
    run = run_online(recipe_of(files, tmp_path / "run", 2, algorithm={"name": "rloo"}), tmp_path)
    rows = read_metrics(run / "metrics.jsonl")
    assert max(row["training/rollout_logp_diff_mean"] for row in rows) < 1e-5


def test_a_replay_learns_the_same_and_refuses_an_altered_picture(files: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(files, data)
    recipe = recipe_of(data, tmp_path / "run", 2, rollout={"record": True})
    run = run_online(recipe, tmp_path)
    recorded = read_step(run / "trajectories", 1)
    assert all(len(record.trajectory.pictures) == 1 for record in recorded)
    assert len({record.trajectory.pictures for record in recorded}) == 4
    (tmp_path / "again").mkdir()
    replay = {"replay": str(run), "record": False}
    again = run_online(recipe_of(data, tmp_path / "again" / "run", 2, rollout=replay), tmp_path / "again")
    losses = [
        [{k: v for k, v in row.items() if k.startswith(("actor/", "critic/"))} for row in stable_metrics(r)]
        for r in (run, again)
    ]
    assert losses[0] == losses[1]
    (data / "3.png").write_bytes(coloured("green", 56))
    altered = write_recipe(
        recipe_of(data, tmp_path / "altered", 2, rollout=replay), tmp_path / "altered.yaml"
    )
    done = run_cli("train", str(altered), check=False)
    assert done.returncode != 0 and "other content" in done.stdout + done.stderr
