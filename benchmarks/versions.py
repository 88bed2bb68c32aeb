"""This checkout beside an earlier commit: exact resume of its runs, and step times in turns.

Each turn trains `tiny-sft`, `tiny-dpo` and `tiny-grpo` (engine hf) with the code of the commit and with that
of this checkout, one after the other. `ratio` is the largest of the three ratios of step times, now over
then, in the median over the turns; `fastest` are the ratios of each side's fastest turn, because other work
on a machine only adds to a time. The runs of the commit are then cut back to their middle and resumed with
this checkout: every metric but times and memory, and the weights and moments of the last step, must be those
of the run that went on alone.

    python benchmarks/versions.py --before COMMIT
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench
from chaos_checks import VOLATILE

RECIPES: dict[str, list[str]] = {
    "tiny-sft": [],
    "tiny-dpo": [],
    "tiny-grpo": ["rollout.engine=hf", "cluster.address=local"],
}
GOAL = 1.05


def isotrain(source: Path, work: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "isotrain.cli.main", *arguments],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if done.returncode:
        raise SystemExit(
            f"isotrain {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )


def train(source: Path, work: Path, name: str, output: str, steps: int) -> Path:
    settings = [f"trainer.steps={steps}", f"trainer.save_every={steps // 2}", "trainer.validate_every=1000"]
    isotrain(source, work, "train", name, f"output={output}", *settings, *RECIPES[name])
    return work / output


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def step_time(run: Path) -> float:
    """The first steps warm caches up."""
    return statistics.median(float(row["timing_s/step"]) for row in rows(run)[3:])


def tensors(run: Path, steps: int) -> dict[str, str]:
    """Digests of the files that hold the state of the last step."""
    files = sorted((run / "checkpoints" / f"step-{steps:08d}").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def resumed_is_equal(now: Path, work: Path, name: str, steps: int) -> int:
    """How many metrics of a resumed run were compared; ends the program at the first that differs."""
    whole = work / f"{name}-before-0"
    resumed = work / f"{name}-resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / f"step-{steps:08d}")
    train(now, work, name, resumed.name, steps)
    if f"resuming after step {steps // 2} of {steps}" not in (resumed / "log.txt").read_text():
        raise SystemExit(f"{name}: this checkout did not resume the run of the commit")
    expected, actual = rows(whole), rows(resumed)
    compared = 0
    for old, new in zip(expected, actual, strict=True):
        kept = {key: value for key, value in old.items() if not key.startswith(VOLATILE)}
        different = {key: (value, new.get(key)) for key, value in kept.items() if new.get(key) != value}
        if different:
            raise SystemExit(f"{name}, step {old['step']}: not resumed exactly: {different}")
        compared += len(kept) if old["step"] > steps // 2 else 0
    if not tensors(whole, steps) or tensors(whole, steps) != tensors(resumed, steps):
        raise SystemExit(f"{name}: the weights or moments after step {steps} differ")
    return compared


def main() -> None:
    parser = bench.Options(__doc__, turns=1, steps=8)
    parser.add_argument("--before", default="HEAD", help="a commit of this repository")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.read()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        archive = subprocess.run(
            ["git", "archive", options.before, "src", "recipes"],
            cwd=bench.REPOSITORY,
            capture_output=True,
            check=True,
        ).stdout
        subprocess.run(["tar", "-x", "-C", work], input=archive, check=True)
        sources = {"before": work / "src", "now": bench.REPOSITORY / "src"}
        isotrain(sources["before"], work, "prepare", "tiny", "--out", "work/tiny")
        times: dict[str, dict[str, list[float]]] = {name: {"before": [], "now": []} for name in RECIPES}
        compared = {}
        for turn in range(options.turns):
            for name in RECIPES:
                for side in sorted(sources, reverse=turn % 2 == 1):
                    run = train(sources[side], work, name, f"{name}-{side}-{turn}", options.steps)
                    times[name][side].append(step_time(run))
                if turn == 0:
                    compared[name] = resumed_is_equal(sources["now"], work, name, options.steps)
            ratios = {
                name: [now / then for then, now in zip(sides["before"], sides["now"], strict=True)]
                for name, sides in times.items()
            }
            worst = max(ratios, key=lambda name: statistics.median(ratios[name]))
            ratio = statistics.median(ratios[worst])
            bench.report(
                "versions",
                ratio,
                GOAL,
                ratio <= GOAL,
                ratios=bench.spread(ratios[worst]),
                fastest={
                    name: float(f"{min(sides['now']) / min(sides['before']):.4g}")
                    for name, sides in times.items()
                },
                resumed_metrics_equal=compared,
                by_recipe={name: bench.spread(values) for name, values in ratios.items()},
                step_s={
                    name: {side: bench.spread(values) for side, values in sides.items()}
                    for name, sides in times.items()
                },
            )


if __name__ == "__main__":
    main()
