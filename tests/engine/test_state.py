"""An engine put back from a checkpoint is the engine that was saved, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isotrain.algorithms.sft import SUPERVISED_LOSSES
from isotrain.data.loader import BatchLoader
from isotrain.device.base import Device
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.engine.engine import LossScale, TrainingEngine, UpdateResult
from isotrain.engine.state import (
    engine_shards,
    generator_shards,
    host_generators,
    optimizer_updates,
    restore,
    saved_counts,
    start_optimizer_state,
)
from isotrain.engine.world import join_world
from isotrain.errors import CheckpointError
from isotrain.models.weights import Shard
from isotrain.observe.console import Console
from isotrain.recipe.schema import Recipe
from isotrain.trainers.build import open_loaders
from isotrain.trainers.launch import launch
from support import run_cli, stable_metrics, tiny_recipe, write_recipe

pytestmark = pytest.mark.heavy

LORA = {"rank": 4, "dropout": 0.1}


@dataclass
class Job:
    """The parts of a run that a checkpoint is made from."""

    device: Device
    engine: TrainingEngine
    loader: BatchLoader

    def step(self, lr: float = 3e-3) -> UpdateResult:
        # Draws on every generator, an odd number of normal ones: NumPy keeps the second of a pair for later.
        random.random()
        np.random.standard_normal()
        batches = [batch.packed for batch in self.loader.next_step().batches]
        return self.engine.step(batches, SUPERVISED_LOSSES["sft"], lr)

    def shards(self) -> dict[str, Shard]:
        return engine_shards(self.engine) | generator_shards(self.device)

    def save(self, root: Path, step: int = 3) -> CheckpointReader:
        writer = CheckpointWriter(root, 0, 1, keep=1)
        writer.save(step, self.shards(), host_generators(), saved_counts(self.engine))
        writer.wait()
        assert writer.failure() is None
        return CheckpointReader(root / f"step-{step:08d}")

    def values(self) -> dict[str, torch.Tensor]:
        return {name: shard.local.detach().cpu().clone() for name, shard in self.shards().items()}


@contextmanager
def job(recipe: Recipe, seed: int = 0) -> Iterator[Job]:
    """A job of one rank; `seed` is that of the generators, not of the weights."""
    device = choose_device(recipe.device.type)
    with join_world(device) as world:
        device.seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        engine = build_engine(recipe.model, recipe.optimizer, device=device, world=world, seed=recipe.seed)
        loader, _ = open_loaders(recipe, device, world, Console())
        yield Job(device, engine, loader)


def recipe_for(tiny: Path, output: Path, device_type: str, lora: bool = False) -> Recipe:
    model = {"lora": LORA} if lora else {}
    return tiny_recipe(tiny, output, device_type, model=model)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]
    assert not different


@pytest.mark.parametrize("lora", [False, True])
def test_round_trip_is_bitwise(tiny: Path, tmp_path: Path, device_type: str, lora: bool) -> None:
    recipe = recipe_for(tiny, tmp_path / "run", device_type, lora)
    with job(recipe) as first:
        for _ in range(3):
            first.step()
        reader = first.save(tmp_path / "checkpoints")
        saved, host, taken = first.values(), host_generators(), first.loader.sampler.taken
        assert {name.split("/")[0] for name in saved} == {"weights", "exp_avg", "exp_avg_sq", "generator"}
        went_on = [first.step() for _ in range(2)]
        later, later_host = first.values(), host_generators()
    with job(recipe, seed=99) as second:
        second.step()
        assert host_generators() != host and second.values().keys() == saved.keys()
        restore(second.engine, second.device, reader)
        second.loader.sampler.taken = taken
        assert_same(second.values(), saved)
        assert host_generators() == host and optimizer_updates(second.engine) == 3
        # All of them count: one parameter that is behind would be corrected for its bias differently.
        assert {float(state["step"]) for state in second.engine.optimizer.state.values()} == {3.0}
        assert [second.step() for _ in range(2)] == went_on
        assert_same(second.values(), later)
        assert host_generators() == later_host


def test_the_loss_scale_is_restored(
    tiny: Path, tmp_path: Path, device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of its course: updates after it double it, and the first overflow, as without a stop."""
    monkeypatch.setattr(LossScale, "growth_interval", 2)
    recipe = tiny_recipe(tiny, tmp_path / "run", device_type, model={"dtype": "float16"})
    with job(recipe) as first:
        first.engine.loss_scale = LossScale(2.0**24)
        while first.engine.loss_scale.finite != 1:
            first.step()
        reader, taken = first.save(tmp_path / "checkpoints"), first.loader.sampler.taken
        expected = replace(first.engine.loss_scale)
        assert expected.skipped > 0
        went_on = [first.step() for _ in range(4)]
        later = first.values()
    assert len({result.scale_metrics["loss_scale"] for result in went_on}) > 1
    with job(recipe, seed=99) as second:
        restore(second.engine, second.device, reader)
        second.loader.sampler.taken = taken
        assert second.engine.loss_scale == expected
        # Overflowed norms may be nan, which is not equal to itself.
        assert repr([second.step() for _ in range(4)]) == repr(went_on)
        assert_same(second.values(), later)


def test_host_generators_go_through_json(tmp_path: Path) -> None:
    random.seed(5)
    random.gauss(0, 1)  # Python, too, keeps the second of a pair
    state = host_generators()
    assert json.loads(json.dumps(state)) == json.loads(json.dumps(host_generators()))
    assert set(state) == {"python", "numpy"}


def test_a_fresh_engine_can_be_saved_and_training_is_not_changed(
    tiny: Path, tmp_path: Path, device_type: str
) -> None:
    """Saving creates the optimizer's state early; the first step must find it as it would have made it."""
    recipe = recipe_for(tiny, tmp_path / "run", device_type)
    with job(recipe) as plain:
        result = plain.step()
        expected, made = plain.values(), _description(plain.engine)
    with job(recipe) as saved_first:
        assert optimizer_updates(saved_first.engine) == 0
        saved_first.save(tmp_path / "checkpoints", step=0)
        assert _description(saved_first.engine) == made
        assert saved_first.step() == result
        assert_same(saved_first.values(), expected)


def _description(engine: TrainingEngine) -> list[dict[str, Any]]:
    """Of each parameter's optimizer state: names, types, places."""
    return [
        {name: (type(value), value.dtype, value.device, value.shape) for name, value in state.items()}
        for state in engine.optimizer.state.values()
    ]


def test_only_what_is_trained_is_saved(tiny: Path, tmp_path: Path) -> None:
    with job(recipe_for(tiny, tmp_path, "cpu", lora=True)) as adapters:
        names = {name for name in engine_shards(adapters.engine) if name.startswith("weights/")}
        assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
        start_optimizer_state(adapters.engine)
        assert len(adapters.engine.optimizer.state) == len(names)


@pytest.mark.parametrize(("saved_on", "resumed_on"), [("cpu", "npu"), ("npu", "cpu")])
def test_another_device_takes_over_weights_and_moments(
    tiny: Path, tmp_path: Path, saved_on: str, resumed_on: str
) -> None:
    with job(recipe_for(tiny, tmp_path / "run", saved_on)) as first:
        first.step()
        reader = first.save(tmp_path / "checkpoints")
        saved = {name: value for name, value in first.values().items() if not name.startswith("generator/")}
    with job(recipe_for(tiny, tmp_path / "run", resumed_on), seed=99) as second:
        fresh = {name: value for name, value in second.values().items() if name.startswith("generator/")}
        host = host_generators()
        restore(second.engine, second.device, reader)
        # Another device draws other numbers from the same state: there is nothing to go on with.
        assert_same(second.values(), saved | fresh)
        assert host_generators() == host and optimizer_updates(second.engine) == 1


def test_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    with job(recipe_for(tiny, tmp_path, "cpu", lora=True)) as adapters:
        reader = adapters.save(tmp_path / "checkpoints")
    with (
        job(recipe_for(tiny, tmp_path, "cpu")) as full,
        pytest.raises(CheckpointError, match=r"the checkpoint has no 'weights/"),
    ):
        restore(full.engine, full.device, reader)


ENOUGH = list(range(624))
PYTHON, NUMPY = [3, [*ENOUGH, 624], None], [ENOUGH, 624, 0, 0.0]


@pytest.mark.parametrize(
    "extras",
    [
        {},
        [],
        {"python": PYTHON},
        {"python": None, "numpy": NUMPY},
        {"python": [3, [1, 2], None], "numpy": NUMPY},
        {"python": [9, [*ENOUGH, 624], None], "numpy": NUMPY},
        {"python": [3, [*ENOUGH, -5], None], "numpy": NUMPY},
        {"python": [3, ["x"] * 625, None], "numpy": NUMPY},
        {"python": PYTHON, "numpy": [ENOUGH, 10**9, 0, 0.0]},
        {"python": PYTHON, "numpy": [ENOUGH, -1, 0, 0.0]},
        {"python": PYTHON, "numpy": [[1, 2], 2, 0, 0.0]},
        {"python": PYTHON, "numpy": [[-1] * 624, 624, 0, 0.0]},
        {"python": PYTHON, "numpy": [[2**40] * 624, 624, 0, 0.0]},
        {"python": PYTHON, "numpy": ["key", 2, 0, 0.0]},
        {"python": PYTHON, "numpy": [ENOUGH, "here", 0, 0.0]},
    ],
)
def test_generators_that_do_not_fit_are_an_error_of_ours(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extras: Any
) -> None:
    with job(recipe_for(tiny, tmp_path, "cpu")) as some:
        reader = some.save(tmp_path / "checkpoints")
        monkeypatch.setattr(reader, "extras", lambda rank: extras)
        with pytest.raises(CheckpointError, match="step-00000003: the generators of rank 0 do not fit"):
            restore(some.engine, some.device, reader)
    np.random.random()  # a position outside of the key would read foreign memory here


def cut_back(run: Path, last: int) -> None:
    """As if the run had been killed after the checkpoint of step `last`."""
    for directory in (run / "checkpoints").glob("step-*"):
        if int(directory.name.removeprefix("step-")) > last:
            shutil.rmtree(directory)


@pytest.mark.slow
@pytest.mark.parametrize("on", ["cpu", "npu"])
def test_another_number_of_ranks_goes_on_with_the_same_run(tiny: Path, tmp_path: Path, on: str) -> None:
    """One rank, then two, then one: sums are taken in another order, so the metrics agree closely only."""
    trainer = {"steps": 12, "save_every": 4}
    observe = {"loggers": ["console"]}
    recipe = tiny_recipe(tiny, tmp_path / "run", on, trainer=trainer, observe=observe)
    launch(recipe, "")
    whole = stable_metrics(tmp_path / "run")
    file = write_recipe(recipe, tmp_path / "recipe.yaml")
    for ranks, resumed_after in ((2, 4), (1, 8)):
        cut_back(tmp_path / "run", resumed_after)
        done = run_cli("train", str(file), f"device.ranks={ranks}", OMP_NUM_THREADS="1")
        assert f"resuming after step {resumed_after} of 12" in done.stdout
        assert "warning: " not in done.stdout and "rror" not in done.stdout + done.stderr
        written = CheckpointReader(tmp_path / "run" / "checkpoints" / "step-00000012")
        assert written.ranks == ranks
        resumed = stable_metrics(tmp_path / "run")
        assert resumed[:resumed_after] == whole[:resumed_after] or ranks == 1
        for mine, expected in zip(resumed, whole, strict=True):
            assert mine == pytest.approx(expected, abs=1e-4, rel=1e-4)
