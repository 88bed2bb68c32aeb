"""Ways of computing the same step that must agree: micro-batches, packing, ranks, recomputation, adapters.

Float32, 24 steps, on every device: the largest difference of the losses is at most 1e-5 and their signed mean
at most 1e-6 (a bias too small for the first bound would show in the second).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from isotrain.algorithms.sft import sft_loss
from isotrain.data.encode import Encoder
from isotrain.data.items import Item, Sample
from isotrain.data.packing import PackedBatch, pack
from isotrain.data.store import SampleStore
from isotrain.data.tokenise import cached_store
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.engine import Loss
from isotrain.engine.world import join_world
from isotrain.models.files import load_tokenizer
from isotrain.models.packed import TokenHead
from isotrain.recipe.schema import ModelSection, OptimizerSection
from isotrain.trainers.launch import launch
from support import FUSED_VARIABLE, how_computed, run_cli, stable_metrics, tiny_recipe, write_recipe

pytestmark = pytest.mark.heavy

STEPS, BATCH = 24, 8
LR = 1e-3

Grouping = Callable[[Sequence[Sample]], list[PackedBatch]]


def together(samples: Sequence[Sample]) -> list[PackedBatch]:
    return [pack(samples)]


def one_by_one(samples: Sequence[Sample]) -> list[PackedBatch]:
    return [pack([sample]) for sample in samples]


@pytest.fixture(scope="module")
def store(tiny: Path, cache: Path) -> SampleStore[Item]:
    tokenizer = load_tokenizer(tiny / "model")
    encoder = Encoder(tokenizer, "auto", "prompt", "completion", max_length=128, too_long="error")
    return cached_store(str(tiny / "train.jsonl"), encoder, cache)


def losses(
    tiny: Path,
    store: SampleStore[Item],
    device_type: str,
    *,
    group: Grouping = together,
    loss: Loss = sft_loss,
    lr: float = LR,
    **model: Any,
) -> list[float]:
    """Loss and gradient norm of every step of a short training."""
    device = choose_device(device_type)
    section = ModelSection(
        path=str(tiny / "model"), **{"dtype": "float32", **how_computed(device_type), **model}
    )
    with join_world(device) as world:
        engine = build_engine(section, OptimizerSection(lr=lr), device=device, world=world, seed=1)
        numbers = []
        for step in range(STEPS):
            samples = [store[step * BATCH + i].samples[0] for i in range(BATCH)]
            numbers.append(engine.step(group(samples), loss, lr).loss)
        return numbers


def assert_same(a: Sequence[float], b: Sequence[float]) -> None:
    assert len(a) == len(b) >= 20
    difference = torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)
    assert difference.abs().max().item() <= 1e-5
    assert abs(difference.mean().item()) <= 1e-6


@pytest.fixture(scope="module")
def reference(tiny: Path, store: SampleStore[Item]) -> list[float]:
    """All samples of a step in one packed micro-batch, on the host."""
    numbers = losses(tiny, store, "cpu")
    assert numbers[-1] < 0.9 * numbers[0], "nothing is learned, so nothing would be compared"
    return numbers


def test_the_devices_agree(tiny: Path, store: SampleStore[Item], reference: list[float]) -> None:
    assert_same(losses(tiny, store, "npu"), reference)


def test_accumulation(tiny: Path, store: SampleStore[Item], reference: list[float], device_type: str) -> None:
    """1 micro-batch of 8 samples == 8 micro-batches of 1."""
    assert_same(losses(tiny, store, device_type, group=one_by_one), reference)


def test_packed_is_padded(
    tiny: Path, store: SampleStore[Item], reference: list[float], device_type: str
) -> None:
    assert_same(losses(tiny, store, device_type, attention="padded"), reference)


def test_gradient_checkpointing(
    tiny: Path, store: SampleStore[Item], reference: list[float], device_type: str
) -> None:
    assert_same(losses(tiny, store, device_type, gradient_checkpointing=False), reference)


def test_logits_chunks(
    tiny: Path, store: SampleStore[Item], reference: list[float], device_type: str
) -> None:
    assert_same(losses(tiny, store, device_type, logits_chunk=7), reference)


def test_loss_through_log_probs(
    tiny: Path, store: SampleStore[Item], reference: list[float], device_type: str
) -> None:
    """The cross-entropy path, whose gradient is taken early, == token log-probs with an ordinary backward."""

    def through_logps(head: TokenHead, loss_tokens: int) -> torch.Tensor:
        return -head.logps().sum() / loss_tokens

    assert_same(losses(tiny, store, device_type, loss=through_logps, logits_chunk=16), reference)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({}, id="packed"),
        pytest.param({"attention": "padded"}, id="padded"),
        pytest.param(
            {"group": one_by_one, "gradient_checkpointing": False}, id="accumulated", marks=pytest.mark.slow
        ),
        pytest.param({"attention": "sdpa", "logits_chunk": 7}, id="layers only", marks=pytest.mark.slow),
    ],
)
def test_fused_operators(
    tiny: Path, store: SampleStore[Item], reference: list[float], way: dict[str, Any]
) -> None:
    """The device's fused operators == the model as it is, on the host."""
    found = losses(tiny, store, "npu", **{**way, "fused": "on"})
    difference = max(abs(a - b) for a, b in zip(found, reference, strict=True))
    print(f"largest difference of {STEPS} losses with and without fused operators: {difference:.1e}")
    assert_same(found, reference)


def test_adapters_over_fused_operators(tiny: Path, store: SampleStore[Item]) -> None:
    plain = losses(tiny, store, "npu", lora={"rank": 8}, fused="off")
    assert_same(losses(tiny, store, "npu", lora={"rank": 8}, fused="on"), plain)


def test_adapters_start_as_the_base_model(tiny: Path, store: SampleStore[Item], device_type: str) -> None:
    """With a learning rate of 0 every step's loss is the untrained model's."""
    base = losses(tiny, store, device_type, lr=0.0)
    adapted = losses(tiny, store, device_type, lr=0.0, lora={"rank": 8})
    assert_same(adapted, base)
    trained = losses(tiny, store, device_type, lora={"rank": 8})
    assert trained[0] == adapted[0] and trained[-1] < adapted[-1]


@pytest.mark.slow
def test_ranks_over_fused_operators(tiny: Path, tmp_path: Path) -> None:
    """2 ranks over fused operators == 1 rank without, on the host."""
    runs = []
    for device_type, ranks, fused in (("cpu", 1, "off"), ("npu", 2, "on")):
        recipe = tiny_recipe(
            tiny,
            tmp_path / device_type,
            device_type,
            device={"ranks": ranks},
            model={"fused": fused},
            trainer={"steps": STEPS},
            data={"tokens_per_micro_batch": 256},
            optimizer={"lr": LR},
        )
        if ranks == 1:
            launch(recipe, "")
        else:
            run_cli("train", str(write_recipe(recipe, tmp_path / f"{device_type}.yaml")))
        runs.append([row["train/loss"] for row in stable_metrics(recipe.output)])
    assert_same(*runs)


SUITE = (
    "invariant/test_invariants.py",
    "trainers/test_supervised.py",
    "trainers/test_preference_training.py",
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tests", SUITE)
def test_the_suite_over_fused_operators(tests: str) -> None:
    """What holds on the simulated npu holds over its fused operators."""
    command = [sys.executable, "-m", "pytest", str(Path(__file__).parents[1] / tests), "-k", "npu"]
    done = subprocess.run(command, env={**os.environ, FUSED_VARIABLE: "on"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("on", "lora_rank", "mesh"),
    [
        ("npu", 8, {}),
        ("cpu", 0, {"context": 2}),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("cpu", 0, {}),
                ("cpu", 8, {}),
                ("npu", 0, {}),
                ("npu", 8, {"context": 2}),
                ("npu", 0, {"context": 2, "context_attention": "ring"}),
                ("npu", 0, {"replicas": 2}),
            )
        ),
    ],
)
def test_ranks(tiny: Path, tmp_path: Path, on: str, lora_rank: int, mesh: dict[str, Any]) -> None:
    """1 rank == 2 ranks, as a user starts them."""
    runs = []
    for ranks in (1, 2):
        recipe = tiny_recipe(
            tiny,
            tmp_path / str(ranks),
            on,
            device={"ranks": ranks, "mesh": mesh if ranks > 1 else {}},
            model={"lora": {"rank": lora_rank}},
            trainer={"steps": STEPS},
            data={"tokens_per_micro_batch": 128},
            optimizer={"lr": LR},
        )
        run_cli("train", str(write_recipe(recipe, tmp_path / f"{ranks}.yaml")))
        runs.append([row["train/loss"] for row in stable_metrics(recipe.output)])
    assert_same(*runs)
