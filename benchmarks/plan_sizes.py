"""`isotrain plan` for published models on 8 to 1,024 devices: what fits, and how long planning takes.

GRPO with prompts of 1,024 and responses of 8,192 tokens, 16 each, on Ascend A3 dies of 64 GB; `plan_models/`
has the models' configurations. `ratio` is the longest time of one plan in minutes. Lower is better.

    python benchmarks/plan_sizes.py [--models qwen3-32b ...] [--devices 8 16 64 1024]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench

GOAL = 1.0
MODELS = Path(__file__).resolve().parent / "plan_models"
# Devices of an engine that hold the weights and a cache beside them.
TENSOR_PARALLEL = {"qwen2.5-7b": 1, "qwen3-32b": 4, "qwen3-30b-a3b": 4, "qwen3-235b-a22b": 16}
RECIPE = """
name: plan
output: runs/plan
device: {ranks: 1024}
data: {train: rows.jsonl, max_length: 1024, batch_size: 512, tokens_per_micro_batch: 16384}
algorithm: {name: grpo}
rollout: {n: 16, max_tokens: 8192, memory_utilization: 0.8}
reward: {math: {}}
"""


def planned(model: str, devices: int, recipe: Path) -> dict[str, Any]:
    started = time.perf_counter()
    parallel = min(TENSOR_PARALLEL[model], devices)
    command = [
        *(sys.executable, "-m", "isotrain", "plan", str(recipe), f"model.path={MODELS / model}"),
        *(f"rollout.tensor_parallel={parallel}", "--devices", str(devices), "--device", "a3", "--json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        return {"error": done.stderr.strip().splitlines()[-1], "seconds": time.perf_counter() - started}
    found = json.loads(done.stdout)
    kept = ("fits", "needed_gb", "step_seconds", "bottleneck")
    return {**{name: found[name] for name in kept}, "seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    parser = bench.Options(__doc__, models=["qwen2.5-7b"], devices=[8])
    parser.add_argument("--models", nargs="+", choices=list(TENSOR_PARALLEL), default=list(TENSOR_PARALLEL))
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16, 64, 1024])
    options = parser.read()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        recipe = Path(directory) / "recipe.yaml"
        recipe.write_text(RECIPE)
        for model in options.models:
            for devices in options.devices:
                rows[f"{model}, {devices}"] = planned(model, devices, recipe)
                longest = max(row["seconds"] for row in rows.values()) / 60
                met = longest <= GOAL and not any("error" in row for row in rows.values())
                bench.report("plan_sizes", round(longest, 3), GOAL, met, plans=rows)


if __name__ == "__main__":
    main()
