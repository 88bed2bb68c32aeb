"""Preference rows with a known truth: a response is good where it is of the kind that was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isotrain.data.prepare.tiny import toy_preferences, toy_prompts
from isotrain.recipe.schema import Recipe
from support import tiny_recipe

ALGORITHMS = ("dpo", "kto", "rm", "prm")
KIND = {"dpo": "pairs", "rm": "pairs", "kto": "responses", "prm": "steps"}


def write_preferences(directory: Path, count: int = 600, seed: int = 0) -> Path:
    """`pairs.jsonl`, `responses.jsonl` and `steps.jsonl`, and a `-held-out` one of each."""
    for suffix, own_seed, rows in (("", seed, count), ("-held-out", seed + 1, 100)):
        prompts = list(toy_prompts(rows, seed=own_seed))
        for name, lines in toy_preferences(prompts, own_seed).items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (directory / f"{name}{suffix}.jsonl").write_text(text)
    return directory


def preference_recipe(
    name: str, tiny: Path, rows: Path, output: Path, device_type: str, **sections: dict[str, Any]
) -> Recipe:
    """A short run of an algorithm on the rows of its kind; `sections` are merged over it."""
    base: dict[str, dict[str, Any]] = {
        "data": {
            "train": str(rows / f"{KIND[name]}.jsonl"),
            "batch_size": 8,
            "max_length": 96 if name == "prm" else 64,
            "tokens_per_micro_batch": 256,
        },
        "algorithm": {"name": name},
        "optimizer": {"lr": 2e-3, "schedule": "constant", "warmup_ratio": 0.0},
        "trainer": {"steps": 4},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return tiny_recipe(tiny, output, device_type, **base)


def assert_same_run(
    expected: list[dict[str, float]], found: list[dict[str, float]], rel: float = 1e-4, abs_: float = 1e-5
) -> None:
    """Metrics agree step by step, but for who wins where a policy still is its reference.

    All margins are 0 there, so that the last bit of a log-prob decides.
    """
    for a, b in zip(expected, found, strict=True):
        undecided = "train/margin" in a and abs(a["train/margin"]) < abs_
        skipped = {"train/accuracy", "train/calibration_error"} if undecided else set()
        kept = {name: value for name, value in a.items() if name not in skipped}
        assert {name: b[name] for name in b if name not in skipped} == pytest.approx(kept, rel=rel, abs=abs_)
