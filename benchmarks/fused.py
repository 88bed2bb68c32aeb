"""Losses of a short run over a device's fused operators against the same run without. Smaller is better.

The tiny model learns its toy task twice, from the same seed and in the same order, through the command line.
`ratio` is the largest difference of the losses over the smallest loss; the step times of both are in the
figures, and mean something on real hardware only.

    PYTHONPATH=tests/device/npusim/site python benchmarks/fused.py [--dtype bfloat16|float32] [--steps 50]

Without the simulated device in `PYTHONPATH` it runs on the accelerator that is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import bench

# Of the loss: float32 sums in another order, bfloat16 rounds in other places.
GOALS = {"float32": 1e-5, "bfloat16": 0.02}


def metrics(data: Path, out: Path, options: argparse.Namespace, fused: str) -> list[dict[str, float]]:
    command = [sys.executable, "-m", "isotrain.cli.main", "train", "tiny-sft", f"output={out}"]
    settings = {
        "device.type": options.device,
        "model.path": data / "model",
        "model.dtype": options.dtype,
        "model.fused": fused,
        "data.train": data / "train.jsonl",
        "data.validation": "null",
        "trainer.steps": options.steps,
    }
    subprocess.run([*command, *(f"{name}={value}" for name, value in settings.items())], check=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = bench.Options(__doc__, dtype="float32", steps=10)
    parser.add_argument("--dtype", default="bfloat16", choices=list(GOALS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="npu")
    parser.add_argument("--architecture", default="qwen3", choices=["llama", "qwen2", "qwen3"])
    options = parser.read()
    from isotrain.data.prepare.tiny import make_tiny

    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "tiny"
        make_tiny(data, architecture=options.architecture)
        runs = {fused: metrics(data, Path(directory) / fused, options, fused) for fused in ("off", "on")}
    plain, fused = ([row["train/loss"] for row in runs[name]] for name in ("off", "on"))
    differences = [b - a for a, b in zip(plain, fused, strict=True)]
    largest = max(map(abs, differences))
    ratio, goal = largest / min(plain), GOALS[options.dtype]
    seconds = {name: [row["timing_s/step"] for row in rows] for name, rows in runs.items()}
    bench.report(
        f"fused {options.dtype} {options.architecture}",
        ratio,
        goal=goal,
        met=ratio <= goal,
        steps=len(plain),
        first_loss=plain[0],
        last_loss=plain[-1],
        last_loss_fused=fused[-1],
        max_loss_difference=largest,
        mean_loss_difference=statistics.fmean(differences),
        step_s=bench.spread(seconds["off"]),
        step_s_fused=bench.spread(seconds["on"]),
    )


if __name__ == "__main__":
    main()
