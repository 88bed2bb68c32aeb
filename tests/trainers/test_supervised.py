"""The supervised loop, whole: recipe in, run directory out, on every device."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import npusim
import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file

from isotrain.device.npu import NPU
from isotrain.errors import NonFiniteError, RecipeError, ZeroGradientError
from isotrain.observe.metrics import read_metrics
from isotrain.trainers.launch import launch
from isotrain.trainers.start import run_lock
from small_models import save_small
from support import run_cli, stable_metrics, tiny_recipe, write_recipe

pytestmark = pytest.mark.heavy


@pytest.mark.usefixtures("plots")
def test_it_learns_and_leaves_a_whole_run_directory(tiny: Path, tmp_path: Path, device_type: str) -> None:
    out = tmp_path / "run"
    recipe = tiny_recipe(
        tiny,
        out,
        device_type,
        data={"validation": str(tiny / "validation.jsonl")},
        trainer={
            "steps": 30,
            "validate_every": 10,
            "validate_first": True,
            "save_every": 10,
            "keep_checkpoints": 2,
        },
        observe={"loggers": ["tensorboard"]},
    )
    launch(recipe, "# as written\n")
    before, *rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert set(before) == {"step", "val/loss"} and before["step"] == 0
    assert rows[9]["val/loss"] < before["val/loss"]
    assert rows[-1]["train/loss"] < 0.6 * rows[0]["train/loss"]
    assert [row["step"] for row in rows if "val/loss" in row] == [10, 20, 30]
    assert rows[-1]["val/loss"] < rows[9]["val/loss"]
    assert rows[-1]["perf/throughput"] > 0 and rows[-1]["perf/max_memory_allocated_gb"] > 0
    assert (out / "recipe.yaml").read_text() == "# as written\n"
    assert json.loads((out / "resolved.json").read_text())["trainer"]["steps"] == 30
    (start,) = json.loads((out / "environment.json").read_text())["starts"]
    assert start["device"]["type"] == device_type and len(start["data"]["train"]) == 64
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-00000020", "step-00000030"]
    assert {p.name for p in (out / "plots").iterdir()} >= {"loss.png", "throughput.png"}
    assert list(out.rglob("*tfevents*"))


def test_determinism_is_told_and_recorded(
    tiny: Path, tmp_path: Path, device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setenv("HCCL_DETERMINISTIC", "false")
    for name in NPU.deterministic_variables({}):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # to be put back after the test
        if name != "HCCL_DETERMINISTIC":
            monkeypatch.delenv(name)
    device = {"determinism": "strict", "type": device_type}
    recipe = tiny_recipe(tiny, tmp_path / "run", device_type, device=device, trainer={"steps": 1})
    try:
        launch(recipe, "")
    finally:
        torch.use_deterministic_algorithms(False)
    (start,) = json.loads((tmp_path / "run" / "environment.json").read_text())["starts"]
    recorded = start["device"]["determinism"]
    assert recorded["level"] == "strict" and recorded["variables"]["PYTHONHASHSEED"] == "0"
    assert len(recorded["not_set"]) == (1 if device_type == "npu" else 0)
    if device_type == "npu":
        assert recorded["variables"]["CLOSE_MATMUL_K_SHIFT"] == "1" == os.environ["CLOSE_MATMUL_K_SHIFT"]


def test_resume_is_exact(tiny: Path, tmp_path: Path, device_type: str) -> None:
    """LoRA with dropout: the generators' state matters too."""
    model = {"path": str(tiny / "model"), "dtype": "float32", "lora": {"rank": 4, "dropout": 0.1}}
    cut_off_and_resume(tiny, tmp_path, device_type, model)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.16"), reason="this version's hybrid models are refused"
)
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text"])
def test_resume_of_a_hybrid_model_is_exact(tiny: Path, tmp_path: Path, device_type: str, kind: str) -> None:
    """Recurrent layers beside attention, and of Qwen3-Next a mixture."""
    model = tmp_path / "model"
    shutil.copytree(tiny / "model", model)  # for its tokenizer
    config = json.loads((model / "config.json").read_text())
    save_small(kind, model, **{name: config[name] for name in ("vocab_size", "eos_token_id")})
    cut_off_and_resume(tiny, tmp_path, device_type, {"path": str(model), "dtype": "float32"})


def cut_off_and_resume(tiny: Path, tmp_path: Path, device_type: str, model: dict[str, Any]) -> None:
    settings = {"model": model, "data": {"validation": str(tiny / "validation.jsonl")}}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    launch(tiny_recipe(tiny, whole, device_type, **settings, trainer={"steps": 9, "save_every": 3}), "")
    # The first part is cut off after its checkpoint of step 6: steps 7 and 8 are lost and must come again.
    recipe = tiny_recipe(tiny, parts, device_type, **settings, trainer={"steps": 9, "save_every": 3})
    launch(recipe, "")
    (parts / "checkpoints" / "step-00000009" / "COMPLETE").unlink()
    torch.manual_seed(999)
    launch(recipe, "")
    assert stable_metrics(parts) == stable_metrics(whole)
    starts = json.loads((parts / "environment.json").read_text())["starts"]
    assert len(starts) == 2
    last, again = (
        sorted((run / "checkpoints" / "step-00000009").glob("*.safetensors")) for run in (whole, parts)
    )
    assert last and [file.read_bytes() for file in last] == [file.read_bytes() for file in again]


def test_a_finished_run_is_left_as_it_is(tiny: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny, tmp_path / "run", "cpu")
    launch(recipe, "")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    launch(recipe, "")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_another_recipe_does_not_resume(tiny: Path, tmp_path: Path) -> None:
    launch(tiny_recipe(tiny, tmp_path / "run", "cpu"), "")
    changed = tiny_recipe(tiny, tmp_path / "run", "cpu", optimizer={"lr": 1e-3})
    with pytest.raises(RecipeError, match=r"optimizer\.lr: 0\.003 -> 0\.001"):
        launch(changed, "")
    never = tiny_recipe(tiny, tmp_path / "run", "cpu", trainer={"resume": "never"})
    with pytest.raises(RecipeError, match="already has a run"):
        launch(never, "")


def test_a_run_directory_is_used_by_one_job_at_a_time(tiny: Path, tmp_path: Path) -> None:
    with run_lock(tmp_path / "run", is_main=True), pytest.raises(RecipeError, match="another process"):
        launch(tiny_recipe(tiny, tmp_path / "run", "cpu"), "")


def test_non_finite_loss_raises_or_is_skipped(tiny: Path, tmp_path: Path, device_type: str) -> None:
    explode = {"lr": 1e30, "max_grad_norm": 0.0, "warmup_ratio": 0.0, "schedule": "constant"}
    recipe = tiny_recipe(tiny, tmp_path / "raise", device_type, optimizer=explode)
    with pytest.raises(NonFiniteError, match=r"step 2: loss .*trainer\.non_finite=skip"):
        launch(recipe, "")
    policy = {"non_finite": "skip", "max_skipped_steps": 2, "steps": 20}
    recipe = tiny_recipe(tiny, tmp_path / "skip", device_type, optimizer=explode, trainer=policy)
    with pytest.raises(NonFiniteError, match="3 updates skipped"):
        launch(recipe, "")
    rows = read_metrics(tmp_path / "skip" / "metrics.jsonl")
    numbers = [(row["train/loss"], row["train/grad_norm"]) for row in rows]
    assert sum(not all(map(math.isfinite, pair)) for pair in numbers) == 2


def test_a_run_whose_updates_are_all_skipped_fails(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    sections = {
        "model": {"path": str(tmp_path / "model")},
        "trainer": {"steps": 2, "non_finite": "skip", "max_skipped_steps": 9},
    }
    with pytest.raises(ZeroGradientError, match="all 2 updates up to step 2 were skipped"):
        launch(tiny_recipe(tiny, tmp_path / "run", "cpu", **sections), "")


@pytest.mark.parametrize("on", [pytest.param("cpu", marks=pytest.mark.slow), "npu"])
def test_two_ranks_and_torchrun_give_the_same_run(tiny: Path, tmp_path: Path, on: str) -> None:
    recipe = tiny_recipe(tiny, tmp_path / "own", on, device={"ranks": 2})
    file = write_recipe(recipe, tmp_path / "recipe.yaml")
    run_cli("train", str(file))
    launched = stable_metrics(tmp_path / "own")
    assert len(launched) == 6
    done = subprocess.run(
        [
            *[sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            *["-m", "isotrain.cli.main", "train", str(file), f"output={tmp_path / 'joined'}"],
        ],
        env={**npusim.environment(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert stable_metrics(tmp_path / "joined") == launched


def test_a_failing_rank_ends_the_job_with_its_words(tiny: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny, tmp_path / "run", "cpu", device={"ranks": 2}, data={"max_length": 4})
    file = write_recipe(recipe, tmp_path / "recipe.yaml")
    done = run_cli("train", str(file), check=False)
    assert done.returncode == 1
    assert "train.jsonl:1" in done.stderr and "data.max_length" in done.stderr
    assert "Traceback" not in done.stderr
