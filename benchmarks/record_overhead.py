"""Steps that record their trajectories against steps that do not. Lower is better.

One run of the recipe `tiny-grpo` (128 responses a step) as `isotrain train` runs it, without validation;
within it, recording is on in one step of every pair and off in the other, and the next pair has them the
other way round. `ratio` is the median over pairs of the time of the step that records over that of the one
that does not. `record_s` is what recording itself takes, `share` that as a part of its step.

    python benchmarks/record_overhead.py [--pairs 30] [--engine vllm|hf]
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import bench

from isotrain.data.prepare.tiny import make_tiny
from isotrain.observe.metrics import read_metrics
from isotrain.recipe.library import locate
from isotrain.recipe.load import load_recipe
from isotrain.recipe.schema import Recipe
from isotrain.trainers.online import run
from isotrain.trainers.online.build import build_trainer
from isotrain.trainers.online.loop import OnlineTrainer

GOAL = 1.05
WARM_UP = 4


def make_recipe(directory: Path, pairs: int, engine: str) -> Recipe:
    make_tiny(directory)
    return load_recipe(
        locate("tiny-grpo"),
        [
            f"output={directory / 'run'}",
            f"model.path={directory / 'model'}",
            f"data.train={directory / 'prompts.jsonl'}",
            "data.validation=null",
            f"reward.function.path={directory / 'reward.py'}:score",
            f"rollout.engine={engine}",
            "rollout.kv_cache_gb=0.25",
            "rollout.record=true",
            f"trainer.steps={WARM_UP + 2 * pairs}",
            "cluster.address=local",
            "observe.loggers=[]",
        ],
    )


def tell(recipe: Recipe) -> None:
    """Of all whole pairs so far."""
    rows = read_metrics(Path(recipe.output) / "metrics.jsonl")[WARM_UP:]
    files = list((Path(recipe.output) / "trajectories").glob("*.parquet"))
    size = sum(file.stat().st_size for file in files) / len(files)
    assert all(("timing_s/record" in row) == records(int(row["step"])) for row in rows)
    neighbours = zip(rows[::2], rows[1::2], strict=True)
    pairs = [sorted(pair, key=lambda row: records(int(row["step"]))) for pair in neighbours]
    ratios = bench.spread([on["timing_s/step"] / off["timing_s/step"] for off, on in pairs])
    bench.report(
        f"record_overhead {recipe.rollout.engine if recipe.rollout else None}",
        ratios["median"],
        goal=GOAL,
        met=ratios["median"] <= GOAL,
        ratios=ratios,
        plain_step_s=bench.spread([off["timing_s/step"] for off, _ in pairs]),
        recording_step_s=bench.spread([on["timing_s/step"] for _, on in pairs]),
        record_s=bench.spread([on["timing_s/record"] for _, on in pairs]),
        share=round(median(on["timing_s/record"] / on["timing_s/step"] for _, on in pairs), 4),
        responses_per_step=int(recipe.data.batch_size * (recipe.rollout.n if recipe.rollout else 0)),
        bytes_per_step=round(size),
    )


def records(step: int) -> bool:
    """Off, on, on, off, and so on, so that neither is always the first of a pair."""
    return step % 4 in (2, 3)


def alternating(build: Any, recipe: Recipe) -> Any:
    def built(*args: Any) -> OnlineTrainer:
        trainer: OnlineTrainer = build(*args)
        directory = trainer.record
        write = trainer.job.recorder.write

        def write_and_switch(step: int, values: Mapping[str, float]) -> None:
            write(step, values)
            trainer.record = directory if records(step + 1) else None
            if step > WARM_UP and step % 2 == 0:
                tell(recipe)

        trainer.record = directory if records(1) else None
        trainer.job.recorder.write = write_and_switch  # type: ignore[method-assign]
        return trainer

    return built


def main() -> None:
    parser = bench.Options(__doc__, pairs=4, engine="hf")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--engine", default="vllm", choices=["vllm", "hf"])
    options = parser.read()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["ISOTRAIN_CACHE"] = f"{directory}/cache"
        recipe = make_recipe(Path(directory), options.pairs, options.engine)
        with patch.object(run, "build_trainer", alternating(build_trainer, recipe)):
            run.train_online(recipe, recipe.model_dump_json())


if __name__ == "__main__":
    main()
