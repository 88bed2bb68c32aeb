"""The validation loss that Muon reaches beside AdamW's, after the same batches. Lower is better.

SFT of all weights, from the same model, with the same order of rows and the same schedule. Each optimizer
runs with each learning rate (`match_rms_adamw` gives Muon's update the size of AdamW's), and the best of each
counts. `ratio` is Muon's loss over AdamW's. There is no goal: which of them wins depends on model and data.
`--quick` trains the tiny model, which has random weights, on toy conversations; without it,
SmolLM2-135M-Instruct learns GSM8K's single calculations.

    python benchmarks/muon.py [--steps 30] [--lr 2e-5 1e-4] [--figure FILE.png]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench
import numpy as np
from smollm2 import smollm2

from isotrain.data.prepare.gsm8k import prepare_gsm8k_sums
from isotrain.data.prepare.tiny import make_tiny
from isotrain.observe import plots
from isotrain.observe.metrics import read_metrics
from isotrain.recipe.load import write_resolved
from isotrain.recipe.schema import Recipe

COLOURS = {"adamw": plots.BLUE, "muon": plots.ORANGE}


def recipe(work: Path, optimizer: str, lr: float, options: Any) -> Recipe:
    files = ("train.jsonl", "validation.jsonl" if bench.QUICK else "test.jsonl")
    train, validation = (str(work / "data" / name) for name in files)
    model = work / "data" / "model" if bench.QUICK else smollm2()
    return Recipe.model_validate(
        {
            "name": f"{optimizer}-{lr:g}",
            "output": str(work / f"{optimizer}-{lr:g}"),
            "model": {"path": str(model), "dtype": "float32"},
            "data": {
                "train": train,
                "validation": validation,
                "batch_size": options.batch_size,
                "max_length": 256,
                "tokens_per_micro_batch": 2048,
                "validation_rows": 64,
            },
            "algorithm": {"name": "sft"},
            "optimizer": {"name": optimizer, "lr": lr, "weight_decay": 0.1},
            "trainer": {"steps": options.steps, "validate_every": max(1, options.steps // 5)},
            "observe": {"loggers": ["console"]},
        }
    )


def curve(run: Path, metric: str) -> tuple[list[int], list[float]]:
    rows = [(int(row["step"]), row[metric]) for row in read_metrics(run / "metrics.jsonl") if metric in row]
    return [step for step, _ in rows], [value for _, value in rows]


def draw(curves: dict[str, dict[str, Any]], file: Path, title: str) -> None:
    figure, (axes,) = plots.new_figure("Loss with Muon and AdamW", title, 1)
    for name, found in curves.items():
        steps, losses = (np.array(values, dtype=np.float64) for values in found["train"])
        plots.curve(axes, steps, losses, COLOURS[name.split("-")[0]], found["label"])
    plots.finish(axes, "training loss")
    file.write_bytes(plots.as_png(figure))


def main() -> None:
    parser = bench.Options(__doc__, steps=60, lr=[1e-3, 5e-3], batch_size=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, nargs="+", default=[2e-5, 1e-4])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--figure", type=Path, help="PNG of the training losses")
    options = parser.read()
    with tempfile.TemporaryDirectory() as directory:
        work, losses, curves = Path(directory), dict[str, dict[str, float]](), {}
        if bench.QUICK:
            make_tiny(work / "data", train_rows=1024, validation_rows=64)
        else:
            prepare_gsm8k_sums(bench.gsm8k(), work / "data")
        for lr in options.lr:
            for optimizer in COLOURS:
                run = recipe(work, optimizer, lr, options)
                write_resolved(run, work / "recipe.yaml")
                command = [sys.executable, "-m", "isotrain.cli.main", "train", str(work / "recipe.yaml")]
                subprocess.run(command, check=True, stdout=sys.stderr)
                _, validation = curve(Path(run.output), "val/loss")
                losses.setdefault(optimizer, {})[f"{lr:g}"] = validation[-1]
                curves[f"{optimizer}-{lr:g}"] = {
                    "train": curve(Path(run.output), "train/loss"),
                    "label": f"{optimizer}, lr {lr:g}",
                }
            adamw, muon = (min(losses[name].values()) for name in COLOURS)
            bench.report(
                "muon", muon / adamw, goal=None, met=None, steps=options.steps, validation_loss=losses
            )
        if options.figure:
            model = "tiny model, toy conversations" if bench.QUICK else "SmolLM2-135M-Instruct, GSM8K"
            draw(curves, options.figure, model)


if __name__ == "__main__":
    main()
