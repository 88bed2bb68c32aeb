"""Judged rows with a known truth: an answer is good where it is of the kind that was asked for."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from isotrain.data.prepare.tiny import toy_prompts
from isotrain.data.prepare.tiny_reward import KINDS
from isotrain.recipe.schema import Recipe
from support import tiny_recipe

ALGORITHMS = ("dpo", "kto", "rm", "prm")
KIND = {"dpo": "pairs", "rm": "pairs", "kto": "answers", "prm": "steps"}


def write_judged(directory: Path, count: int = 600, seed: int = 0) -> Path:
    """`pairs.jsonl`, `answers.jsonl` and `steps.jsonl`, and a `-held-out` one of each."""
    for suffix, own_seed, rows in (("", seed, count), ("-held-out", seed + 1, 100)):
        draw = random.Random(own_seed)
        files: dict[str, list[dict[str, Any]]] = {"pairs": [], "answers": [], "steps": []}
        for row in toy_prompts(rows, seed=own_seed):
            right = row["answer"]
            (wrong,) = set(KINDS) - {right}
            good, bad = _text(right, draw), _text(wrong, draw)
            files["pairs"].append({"prompt": row["prompt"], "chosen": _said(good), "rejected": _said(bad)})
            label = draw.random() < 0.5
            files["answers"].append(
                {"prompt": row["prompt"], "completion": _said(good if label else bad), "label": label}
            )
            labels = [draw.random() < 0.6 for _ in range(draw.randint(1, 3))]
            steps = [_text(right if label else wrong, draw) for label in labels]
            files["steps"].append({"prompt": row["prompt"], "completions": steps, "labels": labels})
        for name, lines in files.items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (directory / f"{name}{suffix}.jsonl").write_text(text)
    return directory


def _text(kind: str, draw: random.Random) -> str:
    return " ".join(draw.choice(KINDS[kind]) for _ in range(draw.randint(1, 4)))


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def judged_recipe(
    name: str, tiny: Path, rows: Path, output: Path, device_type: str, **sections: dict[str, Any]
) -> Recipe:
    """A short run of an algorithm on the rows of its kind; `sections` are merged over it."""
    base: dict[str, dict[str, Any]] = {
        "data": {
            "train": str(rows / f"{KIND[name]}.jsonl"),
            "batch_size": 8,
            "max_length": 64,
            "tokens_per_micro_batch": 256,
        },
        "algorithm": {"name": name},
        "optimizer": {"lr": 2e-3, "schedule": "constant", "warmup_ratio": 0.0},
        "trainer": {"steps": 4},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return tiny_recipe(tiny, output, device_type, **base)
