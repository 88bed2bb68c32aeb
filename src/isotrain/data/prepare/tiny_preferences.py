"""Preference data for the tiny task: a good response has the requested kind of characters."""

from __future__ import annotations

import random
import string
from typing import Any

from isotrain.data.prepare.tiny_reward import KINDS

Rows = list[dict[str, Any]]


def toy_preferences(prompts: Rows, seed: int) -> dict[str, Rows]:
    """`pairs`, `responses` and `steps`, one row of each for every prompt."""
    draw = random.Random(seed)
    rows: dict[str, Rows] = {"pairs": [], "responses": [], "steps": []}
    for asked in prompts:
        prompt, right = asked["prompt"], asked["answer"]
        good, bad = _text(KINDS[right], draw, 4), _spoilt(right, draw)
        rows["pairs"].append({"prompt": prompt, "chosen": _said(good), "rejected": _said(bad)})
        label = draw.random() < 0.5
        rows["responses"].append(
            {"prompt": prompt, "completion": _said(good if label else bad), "label": label}
        )
        labels = [draw.random() < 0.6 for _ in range(draw.randint(1, 3))]
        steps = [_text(KINDS[right], draw, 4) if label else _spoilt(right, draw) for label in labels]
        rows["steps"].append({"prompt": prompt, "completions": steps, "labels": labels})
    return rows


def _text(characters: str, draw: random.Random, longest: int) -> str:
    return " ".join(draw.choice(characters) for _ in range(draw.randint(1, longest)))


def _spoilt(right: str, draw: random.Random) -> str:
    """The other kind, or anything: otherwise any odd response would fool a reward model."""
    (wrong,) = set(KINDS) - {right}
    if draw.random() < 0.5:
        return _text(KINDS[wrong], draw, 4)
    text = _text(string.ascii_letters + string.digits + string.punctuation, draw, 8)
    return text.replace(" ", draw.choice((" ", "")))


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]
