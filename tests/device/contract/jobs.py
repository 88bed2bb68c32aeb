"""The runs whose operators are looked at: every algorithm and attention, in bfloat16 as users train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hand_made_step import step_recipe

from isotrain.recipe.schema import Recipe
from preference_runs import ALGORITHMS as PREFERENCE
from preference_runs import preference_recipe
from support import tiny_recipe

LORA = {"lora": {"rank": 4, "dropout": 0.1}}
KL = {"kl": {"place": "loss", "coefficient": 0.01}, "loss": {"entropy": 0.01}}
ONLINE: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "mini_batch_size": 2, "ppo_epochs": 2, **KL},
    "gspo": {"name": "grpo", "loss": {"name": "gspo"}, "rollout_correction": {"level": "sequence"}},
    "cispo": {
        "name": "grpo",
        "loss": {"name": "cispo"},
        "rollout_correction": {"level": "token", "mode": "mask"},
    },
    "ppo": {"name": "ppo", "kl": {"place": "reward"}},
    "rloo": {"name": "rloo"},
    "reinforce++": {"name": "reinforce++"},
    "remax": {"name": "remax", "loss": {"name": "reinforce"}},
}


def all_jobs(tiny: Path, rows: Path, output: Path) -> dict[str, Recipe]:
    """By name; on the device itself fused attention is one operator: `flash` shows more than it would run.

    Gradient checkpointing, clipping and the fused optimizer are on as they are by default.
    """

    def model(**values: Any) -> dict[str, Any]:
        return {"path": str(tiny / "model"), "dtype": "bfloat16", "attention": "sdpa", **values}

    def sft(name: str, **values: Any) -> Recipe:
        data = {"validation": str(tiny / "validation.jsonl"), "validation_rows": 4}
        return tiny_recipe(tiny, output / name, "npu", model=model(**values), data=data, trainer={"steps": 2})

    jobs = {
        "sft": sft("sft"),
        "sft, lora": sft("lora", **LORA),
        "sft, flash": sft("flash", attention="flash"),
        "sft, padded": sft("padded", attention="padded"),
        "sft, float32": sft("float32", dtype="float32", gradient_checkpointing=False),
    }
    for name in PREFERENCE:
        jobs[name] = preference_recipe(
            name, tiny, rows, output / name, "npu", model=model(), trainer={"steps": 2}
        )
    for name, algorithm in ONLINE.items():
        jobs[name] = step_recipe(tiny, output / name, "npu", model=model(), algorithm=algorithm)
    return jobs
