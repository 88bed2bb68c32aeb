"""The share of bfloat16 weights that a step of GRPO changes: would sending only those pay? Lower is better.

SmolLM2-135M-Instruct on single calculations from GSM8K (`--prompts` x `--responses`), one update a step,
AdamW, in float32. After each step a checkpoint is saved; the weights of two checkpoints in a row are rounded
to bfloat16, as engines get them, and compared. `ratio` is the largest share at the first learning rate. A
changed weight costs its 2 bytes and a place of 4, so changes alone take 3 x share of the bytes.

    python benchmarks/weight_deltas.py [--steps 5] [--lr 1e-6 1e-5]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import bench
import torch
from safetensors import safe_open
from smollm2 import smollm2

from isotrain.data.prepare.gsm8k import prepare_gsm8k_sums
from isotrain.engine.checkpoint.layout import rank_file, step_directory, steps_in
from isotrain.recipe.load import write_resolved
from isotrain.recipe.schema import Recipe

GOAL = 1 / 3
"""Where the changes alone are as many bytes as everything."""
PLACE_BYTES, VALUE_BYTES = 4, 2


def recipe(directory: Path, lr: float, steps: int, prompts: int, responses: int, reward: str) -> Recipe:
    prepare_gsm8k_sums(bench.gsm8k(), directory)
    rewards = Path(__file__).with_name("number_reward.py")
    return Recipe.model_validate(
        {
            "name": "weight-deltas",
            "output": str(directory / "run"),
            "model": {"path": str(smollm2()), "dtype": "float32"},
            "data": {
                "train": str(directory / "train.jsonl"),
                "batch_size": prompts,
                "max_length": 512,
                "tokens_per_micro_batch": 4096,
            },
            "algorithm": {"name": "grpo"},
            "rollout": {"engine": "vllm", "n": responses, "max_tokens": 64, "kv_cache_gb": 0.5},
            "reward": {"function": {"path": f"{rewards}:{reward}"}},
            "cluster": {"address": "local"},
            "optimizer": {"lr": lr, "schedule": "constant", "warmup_ratio": 0.0},
            "trainer": {"steps": steps, "save_every": 1, "keep_checkpoints": steps},
            "observe": {"loggers": ["console"]},
        }
    )


def shares(checkpoints: Path) -> list[float]:
    """Shares of the steps from the second on that changed a weight in float32.

    A step whose responses all have the same reward has no gradient, and says nothing about deltas.
    """
    by_step = []
    for earlier, later in pairwise(sorted(steps_in(checkpoints))):
        changed = total = 0
        learned = False
        with (
            safe_open(step_directory(checkpoints, earlier) / rank_file(0), "pt") as before,
            safe_open(step_directory(checkpoints, later) / rank_file(0), "pt") as after,
        ):
            for name in list(before.keys()):
                if name.startswith("weights/"):
                    a, b = (file.get_tensor(name) for file in (before, after))
                    learned = learned or not torch.equal(a, b)
                    a, b = (weight.to(torch.bfloat16).view(torch.int16) for weight in (a, b))
                    changed += int((a != b).sum())
                    total += a.numel()
        if learned:
            by_step.append(changed / total)
    if not by_step:
        sys.exit("no step changed a weight: all responses to a prompt had the same reward; take more of them")
    return by_step


def main() -> None:
    parser = bench.Options(__doc__, steps=2, lr=[1e-5], prompts=1, responses=2, reward="digits")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--reward", choices=["score", "digits"], default="score", help="of number_reward.py")
    options = parser.read()
    by_lr = {}
    for lr in options.lr:
        with tempfile.TemporaryDirectory() as work:
            sizes = options.steps, options.prompts, options.responses
            run = recipe(Path(work), lr, *sizes, options.reward)
            write_resolved(run, Path(work) / "recipe.yaml")
            subprocess.run(
                [sys.executable, "-m", "isotrain.cli.main", "train", f"{work}/recipe.yaml"],
                check=True,
                stdout=sys.stderr,
            )
            by_lr[lr] = shares(Path(run.output) / "checkpoints")
        largest = max(by_lr[options.lr[0]])
        bench.report(
            "weight_deltas",
            largest,
            goal=GOAL,
            met=largest <= GOAL,
            shares={f"{lr:g}": [round(share, 5) for share in by_step] for lr, by_step in by_lr.items()},
            bytes_over_all={
                f"{lr:g}": round(max(by_step) * (PLACE_BYTES + VALUE_BYTES) / VALUE_BYTES, 3)
                for lr, by_step in by_lr.items()
            },
        )


if __name__ == "__main__":
    main()
