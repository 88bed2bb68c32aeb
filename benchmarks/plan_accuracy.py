"""Peak memory that `isotrain plan` predicts, against the exact counter of the simulated npu.

Each case trains one step of a small model on two ranks (full micro-batches, optimizer state as after an
earlier step) and plans the same recipe from fake steps with fewer layers. `ratio` is the largest relative
difference of the two peaks. Lower is better.

    PYTHONPATH=tests/device/npusim/site python benchmarks/plan_accuracy.py [--cases sft lora ...]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench

GOAL = 0.10
RANKS = 2
SCRIPT = str(Path(__file__).resolve())
LAYERS = 8

SFT: dict[str, Any] = {"algorithm": {"name": "sft"}}
ONLINE: dict[str, Any] = {
    "rollout": {"engine": "hf", "n": 4, "max_tokens": 512},
    "reward": {"function": {"path": "rewards.py:score"}},
    "cluster": {"address": "local"},
}
GRPO = {"algorithm": {"name": "grpo", "kl": {"place": "loss"}}, **ONLINE}
CASES: dict[str, dict[str, Any]] = {
    "sft": SFT,
    "sft-float32": {**SFT, "model": {"dtype": "float32"}},
    "sft-without-checkpointing": {**SFT, "model": {"gradient_checkpointing": False}},
    "lora": {**SFT, "model": {"lora": {"rank": 16}}},
    "mixture": {**SFT, "architecture": "qwen3_moe"},
    "offload-weights": {**SFT, "model": {"offload": {"weights": True}}},
    "offload-optimizer": {**SFT, "model": {"offload": {"optimizer": True}}},
    "offload-activations": {**SFT, "model": {"offload": {"activations": True}}},
    "moments-bfloat16": {**SFT, "optimizer": {"state_dtype": "bfloat16"}},
    "context-ulysses": {**SFT, "mesh": {"context": 2, "context_attention": "ulysses"}},
    "context-ring": {**SFT, "mesh": {"context": 2, "context_attention": "ring"}},
    "dpo": {"algorithm": {"name": "dpo", "reference": "live"}},
    "kto": {"algorithm": {"name": "kto", "reference": "live"}},
    "rm": {"algorithm": {"name": "rm"}},
    "grpo": GRPO,
    "grpo-lora": {**GRPO, "model": {"lora": {"rank": 16}}},
    "ppo": {"algorithm": {"name": "ppo", "kl": {"place": "reward"}}, **ONLINE},
}


def recipe_of(case: dict[str, Any], model: str, device: str) -> dict[str, Any]:
    names: tuple[str, ...] = ("algorithm", "rollout", "reward", "cluster", "optimizer")
    sections = {name: case[name] for name in names if name in case}
    return {
        "name": "plan",
        "output": "runs/plan",
        "model": {
            "path": model,
            "dtype": "bfloat16",
            "attention": "sdpa",
            "fused": "off",  # as plans compute
            "logits_chunk": 256,
            **case.get("model", {}),
        },
        "data": {"train": "rows.jsonl", "max_length": 512, "tokens_per_micro_batch": 2048},
        "device": {"type": device, "ranks": RANKS, "mesh": case.get("mesh", {})},
        **sections,
    }


def counted(setting: dict[str, Any]) -> None:
    """A rank's side: one step, with what the device counts meanwhile."""
    import torch

    from isotrain.device.detect import choose_device
    from isotrain.engine.state import start_optimizer_state
    from isotrain.engine.world import join_world
    from isotrain.recipe.schema import Recipe
    from isotrain.tools.plan.step import run_step

    torch.set_num_threads(1)
    recipe = Recipe.model_validate(setting["recipe"])
    device = choose_device("npu")
    with join_world(device, shape=recipe.device.mesh) as world:

        @contextmanager
        def during(trained: list[Any]) -> Iterator[None]:
            for engine in trained:
                start_optimizer_state(engine)
            torch.get_device_module(world.device).reset_peak_memory_stats()
            yield

        run_step(recipe, device, world, 2, during)
        if world.is_main:
            Path(setting["out"]).write_text(json.dumps({"peak": device.memory().peak}))


def measure(options: argparse.Namespace, models: Path) -> None:
    from isotrain.data.prepare.tiny import make_tiny
    from isotrain.recipe.schema import Recipe
    from isotrain.tools.plan.memory import training_memory
    from isotrain.trainers.launch import run_ranks

    make_tiny(models / "llama", layers=LAYERS, train_rows=1, validation_rows=1)
    make_tiny(models / "qwen3_moe", architecture="qwen3_moe", layers=LAYERS, train_rows=1, validation_rows=1)
    rows: dict[str, Any] = {}
    for name in options.cases:
        case = CASES[name]
        recipe = recipe_of(case, str(models / case.get("architecture", "llama") / "model"), "npu")
        with tempfile.TemporaryDirectory() as job:
            out = Path(job) / "told.json"
            run_ranks(
                (SCRIPT, "--rank", json.dumps({"recipe": recipe, "out": str(out)})), RANKS, Path(job), {}
            )
            real = json.loads(out.read_text())["peak"]
        plan = training_memory(Recipe.model_validate(recipe), LAYERS, RANKS, micro_batches=2)
        rows[name] = {
            "counted_mib": round(real / 2**20, 2),
            "planned_mib": round(plan.peak / 2**20, 2),
            "error": round(plan.peak / real - 1, 4),
        }
        worst = max(abs(row["error"]) for row in rows.values())
        bench.report("plan_accuracy", worst, GOAL, worst <= GOAL, cases=rows)


def main() -> None:
    parser = bench.Options(__doc__, cases=["sft", "grpo"])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.read()
    if options.rank:
        counted(json.loads(options.rank))
        return
    os.environ.update({"TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "NPU_SIM_DEVICES": str(RANKS)})
    with tempfile.TemporaryDirectory() as directory:
        measure(options, Path(directory))


if __name__ == "__main__":
    main()
