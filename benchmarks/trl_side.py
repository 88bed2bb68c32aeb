"""TRL as one side of a benchmark, with the settings that both sides share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import bench
from turns import Turns

BETAS, EPS, DECAY, CLIP = (0.9, 0.999), 1e-8, 0.0, 1.0


# Weights as they are stored, in bfloat16, unless that is slow.
STORED: dict[str, Any] = {"model_init_kwargs": {"dtype": "float32"}} if bench.QUICK else {}


def optimizer(lr: float) -> dict[str, Any]:
    """Of isotrain's recipes."""
    return {
        "lr": lr,
        "betas": BETAS,
        "eps": EPS,
        "weight_decay": DECAY,
        "max_grad_norm": CLIP,
        "schedule": "constant",
        "warmup_ratio": 0.0,
    }


def settings(directory: Path, lr: float) -> dict[str, Any]:
    """Of TRL's: the same optimizer, bfloat16 on the CPU, rows in order, each step logged."""
    return {
        "output_dir": str(directory),
        "learning_rate": lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "weight_decay": DECAY,
        "max_grad_norm": CLIP,
        "use_cpu": True,
        "bf16": not bench.QUICK,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def count_batches(trainer: Any, counted: list[Any], count: Callable[[list[Any], Any], Any]) -> None:
    """Append what `count` says of each batch's examples, and of what the trainer's collation made of them."""
    collate = trainer.data_collator

    def counting(examples: list[Any]) -> Any:
        batch = collate(examples)
        counted.append(count(examples, batch))
        return batch

    trainer.data_collator = counting


def in_turns(steps: int, metrics: Callable[[Mapping[str, float]], dict[str, float]]) -> Any:
    """A callback that answers the parent with `metrics` of what TRL logs of each step."""
    from transformers import TrainerCallback

    class InTurns(TrainerCallback):
        turns: Turns

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.turns = Turns(steps)

        def on_log(self, *_: Any, **given: Any) -> None:
            logs: Mapping[str, float] = given["logs"]
            if "loss" in logs:
                self.turns.after_step(**metrics(logs))

    return InTurns()
