"""Judged answers to the tiny task's requests: good where they are of the kind that was asked for."""

from __future__ import annotations

import random
from typing import Any

from isotrain.data.prepare.tiny_reward import KINDS

Rows = list[dict[str, Any]]


def toy_judged(prompts: Rows, seed: int) -> dict[str, Rows]:
    """`pairs`, `answers` and `steps`, one row of each for every prompt."""
    draw = random.Random(seed)
    rows: dict[str, Rows] = {"pairs": [], "answers": [], "steps": []}
    for asked in prompts:
        prompt, right = asked["prompt"], asked["answer"]
        (wrong,) = set(KINDS) - {right}
        good, bad = _text(right, draw), _text(wrong, draw)
        rows["pairs"].append({"prompt": prompt, "chosen": _said(good), "rejected": _said(bad)})
        label = draw.random() < 0.5
        rows["answers"].append(
            {"prompt": prompt, "completion": _said(good if label else bad), "label": label}
        )
        labels = [draw.random() < 0.6 for _ in range(draw.randint(1, 3))]
        steps = [_text(right if label else wrong, draw) for label in labels]
        rows["steps"].append({"prompt": prompt, "completions": steps, "labels": labels})
    return rows


def _text(kind: str, draw: random.Random) -> str:
    return " ".join(draw.choice(KINDS[kind]) for _ in range(draw.randint(1, 4)))


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]
