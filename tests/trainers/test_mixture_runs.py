"""Mixtures of experts through whole runs: export, resume, ranks, preference training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from isotrain.data.prepare.tiny import make_tiny
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.export import export_run
from isotrain.models.packed import Backbone
from isotrain.trainers.launch import launch
from support import run_cli, stable_metrics, tiny_recipe, write_recipe

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("qwen3_moe")
    make_tiny(out, train_rows=400, validation_rows=40, architecture="qwen3_moe")
    return out


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.parametrize(
    ("architecture", "on"),
    [
        ("qwen3_moe", "npu"),
        ("deepseek_v3", "cpu"),
        pytest.param("qwen3_moe", "cpu", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "npu", marks=pytest.mark.slow),
    ],
)
def test_an_export_is_published_style_and_the_trained_weights(
    tmp_path: Path, architecture: Any, on: str
) -> None:
    tiny = tmp_path / "tiny"
    make_tiny(tiny, train_rows=100, validation_rows=10, architecture=architecture)
    launch(tiny_recipe(tiny, tmp_path / "run", on, trainer={"steps": 3}), "")
    out = export_run(tmp_path / "run", tmp_path / "out", None, adapter_only=False)
    base, exported = (load_file(path / "model.safetensors") for path in (tiny / "model", out))
    assert {name: t.shape for name, t in exported.items()} == {name: t.shape for name, t in base.items()}
    expert = "model.layers.1.mlp.experts.{}.down_proj.weight"
    assert all(not torch.equal(exported[expert.format(e)], base[expert.format(e)]) for e in range(8))
    trained = CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000003")
    for name, parameter in load(out).named_parameters():
        assert torch.equal(parameter, trained.whole(f"weights/{Backbone.prefix}{name}")), name
    configs = [json.loads((path / "config.json").read_text()) for path in (tiny / "model", out)]
    assert configs[0] == configs[1]


def test_resume_is_exact(mixture: Path, tmp_path: Path, device_type: str) -> None:
    settings = {"model": {"path": str(mixture / "model"), "dtype": "float32", "router_aux_loss": 0.01}}
    whole, parts = (
        tiny_recipe(mixture, tmp_path / name, device_type, **settings, trainer={"steps": 6, "save_every": 3})
        for name in ("whole", "parts")
    )
    launch(whole, "")
    launch(parts, "")
    (tmp_path / "parts" / "checkpoints" / "step-00000006" / "COMPLETE").unlink()
    launch(parts, "")
    found = stable_metrics(tmp_path / "parts")
    assert found == stable_metrics(tmp_path / "whole")
    # 2 if every expert gets as many tokens: the sum over the two that each token is sent to.
    assert all(row["train/router_aux_loss"] >= 1.9 for row in found)


@pytest.mark.slow
@pytest.mark.parametrize("on", ["cpu", "npu"])
def test_two_ranks_are_one(mixture: Path, tmp_path: Path, on: str) -> None:
    runs = []
    for ranks in (1, 2):
        recipe = tiny_recipe(
            mixture,
            tmp_path / str(ranks),
            on,
            device={"ranks": ranks},
            trainer={"steps": 12},
            data={"tokens_per_micro_batch": 128},
            optimizer={"lr": 1e-3},
        )
        run_cli("train", str(write_recipe(recipe, tmp_path / f"{ranks}.yaml")))
        runs.append([row["train/loss"] for row in stable_metrics(recipe.output)])
        out = export_run(Path(recipe.output), tmp_path / f"out{ranks}", None, adapter_only=False)
        runs.append(list(load_file(out / "model.safetensors")))
    assert max(abs(a - b) for a, b in zip(runs[0], runs[2], strict=True)) <= 1e-5
    assert runs[0][-1] < 0.95 * runs[0][0]
    assert runs[1] == runs[3]


def test_dpo_learns_the_pairs(mixture: Path, tmp_path: Path, device_type: str) -> None:
    recipe = tiny_recipe(
        mixture,
        tmp_path / "run",
        device_type,
        data={"train": str(mixture / "pairs.jsonl"), "batch_size": 16},
        algorithm={"name": "dpo"},
        optimizer={"lr": 5e-3, "schedule": "constant", "warmup_ratio": 0.0},
        trainer={"steps": 20},
    )
    launch(recipe, "")
    rows = stable_metrics(tmp_path / "run")
    # Policy and reference are the same mixture at first.
    assert math.isclose(rows[0]["train/loss"], math.log(2), abs_tol=1e-5)
    loss, accuracy = (sum(row[f"train/{name}"] for row in rows[-4:]) / 4 for name in ("loss", "accuracy"))
    print(f"last 4 of {len(rows)} steps: loss {loss:.3f}, accuracy {accuracy:.2f}")
    assert loss < 0.55 and accuracy > 0.7  # log 2 and 0.5 at chance
