"""What `model.fused` chooses, for every model that a run builds, and that the choice is told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import npusim
import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    GemmaConfig,
    GemmaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from isotrain.data.items import Sample
from isotrain.data.packing import pack
from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.engine.build import (
    build_critic,
    build_engine,
    build_reference,
    build_reward_model,
    build_step_classifier,
    choose_attention,
)
from isotrain.engine.engine import InferenceModel, TrainingEngine
from isotrain.engine.world import World, join_world
from isotrain.errors import ModelError
from isotrain.models.fused import NONE_FUSED, Fused
from isotrain.recipe.schema import ModelSection, OptimizerSection
from isotrain.trainers.launch import launch
from support import tiny_recipe

EVERYTHING = ("attention", "rms_norm", "swiglu", "rotary")
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma")
    GemmaForCausalLM(GemmaConfig(**SMALL)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windowed")
    MistralForCausalLM(MistralConfig(**SMALL, sliding_window=5)).save_pretrained(path)
    return path


@pytest.fixture
def npu() -> Device:
    return choose_device("npu")


@pytest.fixture
def world(npu: Device) -> Iterator[World]:
    with join_world(npu) as world:
        yield world


def test_fused_operators_are_the_default(npu: Device, world: World, tiny: Path) -> None:
    model = ModelSection(path=str(tiny / "model"), dtype="float32")
    engine = build_engine(model, OptimizerSection(), device=npu, world=world, seed=0)
    assert model.fused == "auto" and engine.model.fused.operators == EVERYTHING


@pytest.mark.heavy
def test_the_host_does_not_wait_for_experts(tmp_path: Path) -> None:
    """Twice in an update, for loss and gradient norm; with a loop over experts at each of them."""
    make_tiny(
        tmp_path / "tiny", train_rows=1, validation_rows=1, architecture="qwen3_moe", hidden=128, heads=2
    )
    waits = {}
    for fused in ("off", "auto"):
        script = Path(__file__).parents[2] / "benchmarks" / "dispatch_budget.py"
        counted = [sys.executable, str(script), "--update", str(tmp_path / "tiny" / "model")]
        done = subprocess.run(
            [*counted, "--fused", fused],
            env=npusim.environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        waits[fused] = json.loads(done.stdout.splitlines()[-1])["waits"]
    assert waits["auto"] <= 2 and waits["off"] >= 50


def section(path: Path, fused: str, **model: Any) -> ModelSection:
    return ModelSection.model_validate({"path": str(path), "dtype": "float32", "fused": fused, **model})


@pytest.mark.parametrize(
    ("fused", "asked", "chosen"),
    [
        ("off", "auto", "sdpa"),
        ("off", "padded", "padded"),
        ("auto", "auto", "fused"),
        ("auto", "sdpa", "sdpa"),
        ("auto", "flash", "flash"),
        ("auto", "padded", "padded"),
        ("on", "auto", "fused"),
        ("on", "padded", "fused-padded"),
        ("on", "sdpa", "sdpa"),
    ],
)
def test_attention_follows_device_and_recipe(
    tiny: Path, npu: Device, fused: str, asked: str, chosen: str
) -> None:
    assert choose_attention(tiny / "model", section(tiny, fused, attention=asked), npu) == chosen


@pytest.mark.parametrize("asked", ["auto", "padded"])
def test_windows_are_not_fused(windowed: Path, npu: Device, asked: str) -> None:
    chosen = choose_attention(windowed, section(windowed, "on", attention=asked), npu)
    assert chosen == ("sdpa" if asked == "auto" else "padded")


def test_refuses_fused_operators_that_the_device_does_not_have(tiny: Path) -> None:
    cpu = choose_device("cpu")
    with join_world(cpu) as world:
        place: dict[str, Any] = {"device": cpu, "world": world, "seed": 0}
        engine = build_engine(section(tiny / "model", "auto"), OptimizerSection(), **place)
        assert engine.model.fused == NONE_FUSED and engine.model.attention == "sdpa"
        with pytest.raises(ModelError, match=r"model\.fused: 'cpu' has no fused operators; use auto or off"):
            build_engine(section(tiny / "model", "on"), OptimizerSection(), **place)


def test_unknown_layers_stay_as_they_are_or_are_refused(gemma: Path, npu: Device, world: World) -> None:
    place: dict[str, Any] = {"device": npu, "world": world, "seed": 0}
    engine = build_engine(section(gemma, "auto"), OptimizerSection(), **place)
    assert engine.model.fused == Fused(("attention", "rotary"), ("GemmaMLP", "GemmaRMSNorm"))
    with pytest.raises(ModelError, match=r"missing: rms_norm, swiglu; .*GemmaRMSNorm\); use auto"):
        build_engine(section(gemma, "on"), OptimizerSection(), **place)


def sample(length: int) -> Sample:
    tokens_T = np.random.default_rng(length).integers(3, 500, length).astype(np.int32)
    return Sample(tokens_T, np.arange(length) > 1)


def build(
    kind: str, model: ModelSection, classifier: Path, device: Device, world: World
) -> TrainingEngine | InferenceModel:
    place: dict[str, Any] = {"device": device, "world": world}
    optimizer = OptimizerSection()
    if kind == "adapters":
        return build_engine(model, optimizer, seed=0, **place)
    if kind == "critic":
        return build_critic(model, optimizer, path=str(classifier), **place)
    if kind == "steps":
        return build_step_classifier(model, optimizer, **place)
    if kind == "reward":
        return build_reward_model(str(classifier), model, **place)
    return build_reference(model, **place)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["reference", "adapters", "critic", "steps", "reward"])
def test_fused_operators_reach_every_kind_of_model(
    tiny: Path, tmp_path: Path, npu: Device, world: World, kind: str, dtype: str
) -> None:
    """Reward model and scalar heads, frozen ones, adapters; bfloat16 is cast by FSDP2."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny / "model", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    results = []
    for fused in ("off", "on"):
        model = section(tiny / "model", fused, dtype=dtype, lora={"rank": 4 if kind == "adapters" else 0})
        built = build(kind, model, tmp_path, npu, world)
        assert built.model.fused.operators == (EVERYTHING if fused == "on" else ())
        batches = [pack([sample(9), sample(30)])]
        results.append(built.infer(batches, lambda head: head.hidden_ND)[0].float())
    tolerance = 1e-5 if dtype == "float32" else 0.05
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
    assert dtype == "float32" or not torch.equal(*results), "nothing was fused"


@pytest.mark.parametrize(("fused", "operators"), [("off", []), ("auto", list(EVERYTHING))])
def test_the_choice_is_told_and_recorded(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fused: str, operators: list[str]
) -> None:
    recipe = tiny_recipe(
        tiny, tmp_path, "npu", model={"fused": fused}, trainer={"steps": 1}, observe={"loggers": ["console"]}
    )
    launch(recipe, "")
    assert f"fused operators: {', '.join(operators) or 'none'}" in " ".join(capsys.readouterr().out.split())
    (start,) = json.loads((tmp_path / "environment.json").read_text())["starts"]
    assert start["model"]["fused"] == operators and start["model"]["unfused"] == []
    assert start["model"]["attention"] == ("fused" if operators else "sdpa")
    assert json.loads((tmp_path / "resolved.json").read_text())["model"]["fused"] == fused
