"""Memory of fake tensors is what a device counts."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import communicator_ranks
import npusim
import pytest
import torch

from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.detect import choose_device
from isotrain.engine.state import start_optimizer_state
from isotrain.engine.world import join_world
from isotrain.errors import PlanError
from isotrain.recipe.schema import Recipe
from isotrain.tools.plan import memory
from isotrain.tools.plan.ledger import can_count
from isotrain.tools.plan.memory import training_memory
from isotrain.tools.plan.step import run_step

LAYERS = 6

pytestmark = pytest.mark.skipif(not can_count(), reason="this torch cannot run a step on fake tensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_tiny(path, layers=LAYERS, train_rows=1, validation_rows=1)
    return str(path / "model")


def recipe(path: str, **sections: Any) -> Recipe:
    given = {"path": path, "dtype": "float32", "attention": "sdpa", "logits_chunk": 128, "fused": "off"}
    return Recipe.model_validate(
        {
            "name": "plan",
            "output": "runs/plan",
            "data": {"train": "rows.jsonl", "max_length": 256, "tokens_per_micro_batch": 512},
            "device": {"type": "npu", **sections.pop("device", {})},
            "model": {**given, **sections.pop("model", {})},
            "algorithm": {"name": "sft"},
            **sections,
        }
    )


def counted(recipe: Recipe) -> int:
    """By the simulated device, over a step."""
    device = choose_device("npu")
    gc.collect()
    with join_world(device) as world:
        before = 0

        @contextmanager
        def during(trained: list[Any]) -> Iterator[None]:
            for engine in trained:
                start_optimizer_state(engine)
            torch.get_device_module(world.device).reset_peak_memory_stats()
            yield

        before = device.memory().allocated
        run_step(recipe, device, world, 2, during)
        return device.memory().peak - before


ONLINE = {
    "rollout": {"engine": "hf", "n": 2, "max_tokens": 128},
    "reward": {"function": {"path": "rewards.py:score"}},
    "cluster": {"address": "local"},
}


@pytest.mark.parametrize(
    ("sections", "within"),
    [
        ({}, 0.001),
        ({"optimizer": {"name": "muon"}}, 0.01),
        pytest.param({"model": {"offload": {"weights": True}}}, 0.01, marks=pytest.mark.slow),
        # How a prompt's keys reach its responses is different on this device.
        pytest.param(
            {"algorithm": {"name": "grpo", "kl": {"place": "loss"}}, **ONLINE}, 0.12, marks=pytest.mark.slow
        ),
    ],
)
def test_planned_memory_equals_the_devices_counter(
    model: str, sections: dict[str, Any], within: float
) -> None:
    planned = training_memory(recipe(model, **sections), LAYERS, ranks=1, micro_batches=2)
    assert planned.communicators == (0, 0)
    assert planned.peak == pytest.approx(counted(recipe(model, **sections)), rel=within)


@pytest.mark.slow
def test_communicators_are_those_that_ranks_make(model: str) -> None:
    """Four ranks on the simulated device, whose groups count what they have exchanged."""
    command = [sys.executable, communicator_ranks.__file__, model]
    outputs = npusim.run_ranks(command, communicator_ranks.RANKS, timeout=400)
    made = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert all(rank == made[0] for rank in made)
    for kind, mesh in communicator_ranks.MESHES.items():
        device = {"ranks": communicator_ranks.RANKS, "mesh": mesh}
        given = recipe(model, device=device, data=communicator_ranks.DATA)
        planned = memory.run_fake_step(given, 3, communicator_ranks.RANKS, micro_batches=1)
        assert planned["communicators"] == made[0][kind], kind
    # All ranks; those of a micro-batch, too; those that split heads, and a ring between these.
    assert made[0] == {"data": [1, 0], "ulysses": [2, 0], "ring": [2, 1], "both": [3, 1]}


@pytest.mark.slow
def test_weights_and_moments_are_divided_by_the_ranks(model: str) -> None:
    """Float32 weights and two moments of the same size, over 1,024 ranks as over 2."""
    given = recipe(model)
    few, many = (training_memory(given, LAYERS, ranks, micro_batches=2) for ranks in (2, 1024))
    assert few.all_parameters == many.all_parameters == few.trained
    for ranks, found in ((2, few), (1024, many)):
        assert found.parts["weights"] == pytest.approx(4 * found.all_parameters / ranks, rel=0.05, abs=40_000)
        assert found.parts["optimizer state"] == pytest.approx(
            8 * found.all_parameters / ranks, rel=0.05, abs=80_000
        )


@pytest.mark.slow
def test_experts_are_not_padded(tmp_path: Path) -> None:
    """Eight of them on 64 ranks: rows of each are sharded, and a layer is gathered in about its size."""
    make_tiny(tmp_path, layers=LAYERS, train_rows=1, validation_rows=1, architecture="qwen3_moe")
    given = recipe(str(tmp_path / "model"), model={"dtype": "bfloat16"})
    few, many = (training_memory(given, LAYERS, ranks, micro_batches=2) for ranks in (8, 64))
    assert many.parts["weights"] == pytest.approx(4 * many.all_parameters / 64, rel=0.05)
    assert many.parts["gathered layers"] <= 1.1 * few.parts["gathered layers"]
    assert many.peak < few.peak


@pytest.mark.slow
def test_memory_of_all_layers_follows_from_few(model: str) -> None:
    """The peak of all layers, from a step with three and one with five of them."""
    given = recipe(model)
    told = training_memory(given, LAYERS, ranks=2, micro_batches=2)
    whole = memory.run_fake_step(given, LAYERS, ranks=2, micro_batches=2)
    assert told.peak == max(sum(parts.values()) for parts in whole["peaks"].values())


def test_names_the_reason_why_a_step_cannot_be_planned(model: str) -> None:
    padded = {"device": {"ranks": 2, "mesh": {"context": 2}}, "model": {"attention": "padded"}}
    with pytest.raises(PlanError, match=r"cannot be planned: .*cannot be split over ranks"):
        training_memory(recipe(model, **padded), LAYERS, ranks=2, micro_batches=1)


def test_a_fake_step_has_a_time_limit(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(PlanError, match="not planned within"):
        training_memory(recipe(model), LAYERS, ranks=1, micro_batches=1)
