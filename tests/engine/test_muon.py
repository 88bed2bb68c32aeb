"""Muon is torch's, on any number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import muon_ranks
import npusim
import pytest
import torch
from jobs import SAMPLES, Tensors, policy_objective, results, updates
from muon_ranks import KINDS
from torch import nn

from few_experts import save_few_experts
from isotrain.data.packing import pack
from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.state import engine_shards
from isotrain.engine.world import join_world
from isotrain.errors import RecipeError
from isotrain.models.weights import shard_of
from isotrain.recipe.load import parse_recipe
from isotrain.recipe.schema import ModelSection, OptimizerSection

LR = 1e-3  # that of `updates`


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    make_tiny(path / "dense", train_rows=1, validation_rows=1)
    save_few_experts(path / "mixture", 2)
    return path


def build(path: Path, device_type: str, world: Any, model: dict[str, Any], **muon: Any) -> TrainingEngine:
    section = {"path": str(path), "dtype": "float32", "logits_chunk": 16, "fused": "off", **model}
    optimizer = {"name": "muon", "max_grad_norm": 0.1, "weight_decay": 0.1, **muon}
    return build_engine(
        ModelSection.model_validate(section),
        OptimizerSection.model_validate(optimizer),
        device=choose_device(device_type),
        world=world,
        seed=0,
    )


class Plain:
    """torch's Muon and AdamW over copies of an engine's weights; gradients are the engine's, clipped."""

    def __init__(self, engine: TrainingEngine, **muon: Any) -> None:
        self.engine = engine
        self.whole = {name: shard_of(p.detach()).local.clone() for name, p in engine.trained.items()}
        self.parts: dict[str, list[nn.Parameter]] = {}
        groups: dict[str, list[nn.Parameter]] = {"matrix": [], "decayed": [], "vector": []}
        for name, tensor in self.whole.items():
            outer = name.endswith(("embed_tokens.weight", "lm_head.weight"))
            kind = "vector" if tensor.ndim == 1 else "decayed" if outer else "matrix"
            self.parts[name] = [nn.Parameter(x) for x in (tensor if tensor.ndim == 3 else [tensor])]
            groups[kind] += self.parts[name]
        self.muon = torch.optim.Muon(groups["matrix"], lr=LR * 2, weight_decay=0.1, **muon)
        rest = [
            {"params": groups["decayed"], "weight_decay": 0.1},
            {"params": groups["vector"], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(rest, lr=LR, betas=(0.9, 0.95), eps=1e-8, fused=True)
        engine.optimizer.register_step_pre_hook(self.step)

    def step(self, *_: Any) -> None:
        for name, p in self.engine.trained.items():
            assert p.grad is not None
            gradient = shard_of(p.grad).local.clone()
            for part, g in zip(self.parts[name], gradient if p.ndim == 3 else [gradient], strict=True):
                part.grad = g
        self.muon.step()
        self.adamw.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dense", {}),
        ("mixture", {}),
        ("dense", {"momentum": 0.8, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "original"}),
    ],
)
def test_it_is_torchs_muon_and_adamw(
    models: Path, device_type: str, kind: str, options: dict[str, Any]
) -> None:
    with join_world(choose_device(device_type)) as world:
        path = models / kind / "model"
        engine = build(path, device_type, world, {}, muon={"lr_ratio": 2, **options})
        plain = Plain(engine, **{"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw", **options})
        before = {name: tensor.clone() for name, tensor in plain.whole.items()}
        updates(engine, policy_objective, [pack(SAMPLES)], steps=3)
        for name, p in engine.trained.items():
            assert torch.equal(shard_of(p.detach()).local, plain.whole[name]), name
            assert not torch.equal(before[name], plain.whole[name]), name
        moments = {name.partition("/")[0] for name in engine_shards(engine)}
        assert moments == {"weights", "exp_avg", "exp_avg_sq", "momentum_buffer"}
        one = {name.partition("/")[2] for name in engine_shards(engine) if name.startswith("momentum")}
        assert one == {name for name, parts in plain.parts.items() if parts[0] in plain.muon.state}


def test_moments_elsewhere_and_weights_elsewhere_change_no_bit(models: Path) -> None:
    with join_world(choose_device("npu")) as world:
        found = []
        for offload in ({}, {"optimizer": True}, {"weights": True}):
            engine = build(models / "mixture" / "model", "npu", world, {"offload": offload})
            updates(engine, policy_objective, [pack(SAMPLES)], steps=2)
            on = {t.device.type for s in engine.optimizer.state.values() for k, t in s.items() if k != "step"}
            assert on == {"cpu" if offload else "npu"}
            found.append([shard_of(p.detach()).local.cpu() for p in engine.trained.values()])
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other))


def test_bfloat16_momentum(models: Path, device_type: str) -> None:
    with join_world(choose_device(device_type)) as world:
        found = []
        for dtype in ("float32", "bfloat16"):
            engine = build(models / "dense" / "model", device_type, world, {}, state_dtype=dtype)
            updates(engine, policy_objective, [pack(SAMPLES)], steps=3)
            kept = {t.dtype for s in engine.optimizer.state.values() for k, t in s.items() if k != "step"}
            assert kept == {getattr(torch, dtype)}
            found.append(torch.cat([p.detach().flatten().cpu() for p in engine.trained.values()]))
        assert not torch.equal(*found)
        torch.testing.assert_close(*found, rtol=0, atol=2e-4)


Trained = Callable[[str, int, str], list[Tensors]]


@pytest.fixture(scope="module")
def trained(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    @cache
    def run(device: str, ranks: int, mesh: str = "{}") -> list[Tensors]:
        out = tmp_path_factory.mktemp(f"{device}-{ranks}")
        command = [sys.executable, muon_ranks.__file__, device, str(models), str(out), mesh]
        npusim.run_ranks(command, ranks, timeout=300)
        return results(out, ranks)

    return run


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (2, "{}"),
        pytest.param(3, "{}", marks=pytest.mark.slow, id="uneven shards"),
        pytest.param(4, "{}", marks=pytest.mark.slow),
        pytest.param(4, '{"replicas": 2}', marks=pytest.mark.slow),
    ],
)
def test_ranks_change_no_bit_and_resuming_neither(
    trained: Trained, device_type: str, ranks: int, mesh: str
) -> None:
    (expected,) = trained(device_type, 1, "{}")
    for found in trained(device_type, ranks, mesh):
        assert found.keys() == expected.keys()
        assert not [name for name in expected if not torch.equal(expected[name], found[name])]
    for kind in KINDS:
        names = [name for name in expected if name.startswith(f"{kind}/trained")]
        assert len(names) > 10
        resumed = [name.replace("/trained/", "/resumed/") for name in names]
        assert all(torch.equal(expected[a], expected[b]) for a, b in zip(names, resumed, strict=True))


def test_adapters_are_refused() -> None:
    text = """
    {name: x, output: x, algorithm: {name: sft}, data: {train: x.jsonl},
     model: {path: x, lora: {rank: 4}}, optimizer: {name: muon}}
    """
    with pytest.raises(RecipeError, match=r"use adamw, or set model\.lora\.rank to 0"):
        parse_recipe(text, "recipe")
