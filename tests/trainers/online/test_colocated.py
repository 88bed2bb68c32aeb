"""Colocated runs on a simulated npu with no byte to spare: ranks and engine are never on it together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import npusim
import pytest
from online_runs import OnlineRun, online_recipe
from transformers import AutoModelForSequenceClassification

from isotrain.data.prepare.tiny import make_tiny
from isotrain.observe.metrics import read_metrics
from isotrain.recipe.schema import Recipe
from support import stable_metrics

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

# What an offloaded rank and a sleeping engine leave on the device: rotary frequencies and generators' states.
MARGIN = 64 << 10


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny task with a model that is large beside its activations."""
    path = tmp_path_factory.mktemp("wide")
    make_tiny(path, train_rows=64, validation_rows=8, hidden=256)
    return path


@pytest.fixture(scope="module")
def reward_model(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward-model")
    model: Any = AutoModelForSequenceClassification.from_pretrained(wide / "model", num_labels=1)
    model.save_pretrained(path)
    return path


def case(name: str, wide: Path, reward_model: Path, output: Path) -> Recipe:
    sections: dict[str, dict[str, Any]] = {
        "grpo": {},
        "ppo": {"algorithm": {"name": "ppo", "critic": {"lr": 1e-3, "warmup_steps": 1}}},
        "grpo with a reward model": {
            "algorithm": {"name": "grpo", "kl": {"place": "loss"}},
            "reward": {"model": {"path": str(reward_model), "weight": 0.5}},
        },
    }[name]
    return online_recipe(
        wide,
        output,
        "npu",
        data={
            "train": str(wide / "prompts.jsonl"),
            "validation": str(wide / "prompts-validation.jsonl"),
            "validation_rows": 2,
            "batch_size": 4,
            "max_length": 64,
            "tokens_per_micro_batch": 160,
        },
        # Many and long responses: the engine's cache is as large as what training holds.
        rollout={"engine": "hf", "n": 16, "max_tokens": 96},
        trainer={"steps": 2, "save_every": 1, "validate_every": 1, "validate_first": True},
        **sections,
    )


class Machine:
    """A simulated machine with one device, and what was used of it."""

    def __init__(self, directory: Path, memory: int | None = None) -> None:
        directory.mkdir()
        self.directory = directory
        wanted = npusim.environment(1, host=directory, memory=memory)
        self.variables = {name: value for name, value in wanted.items() if name.startswith("NPU_SIM")}

    @property
    def together(self) -> int:
        return npusim.usage(self.directory).peak

    def largest(self) -> tuple[int, int]:
        """What a rank and what an engine needed for itself."""
        used = npusim.usage(self.directory).processes
        return max(p.peak for p in used if p.rank >= 0), max(p.peak for p in used if p.rank < 0)


@pytest.mark.parametrize(
    ("name", "tried"),
    [
        ("grpo with a reward model", False),
        *(
            pytest.param(name, True, marks=pytest.mark.slow)
            for name in ("grpo with a reward model", "grpo", "ppo")
        ),
    ],
)
def test_a_run_fits_where_the_larger_of_both_does(
    wide: Path, reward_model: Path, tmp_path: Path, name: str, tried: bool
) -> None:
    """By what both held at any time, and `tried` on a device with just that memory."""
    ample = Machine(tmp_path / "ample")
    recipe = case(name, wide, reward_model, tmp_path / "ample-run")
    run = OnlineRun(recipe, tmp_path, "ample", **ample.variables).finish()
    trainer, engine = ample.largest()
    print(f"{name}: trainer {trainer:,}, engine {engine:,}, together {ample.together:,} bytes")
    assert min(trainer, engine) > 0.4 * max(trainer, engine), "otherwise both would fit side by side"
    assert ample.together <= max(trainer, engine) + MARGIN
    if not tried:
        return
    tight = Machine(tmp_path / "tight", memory=max(trainer, engine) + MARGIN)
    recipe = case(name, wide, reward_model, tmp_path / "tight-run")
    again = OnlineRun(recipe, tmp_path, "tight", **tight.variables).finish()
    assert stable_metrics(again) == stable_metrics(run)
    assert len(read_metrics(again / "metrics.jsonl")) == 3  # with the validation before the first step
    assert sorted(path.name for path in (again / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (1, 2)
    ]
