"""Online runs on pictures whose colour says what to write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from online_runs import online_recipe

from isotrain.data.prepare import tiny_reward
from isotrain.recipe.schema import Recipe
from vision_models import coloured, make_vlm

BATCH, N, MAX_TOKENS = 16, 8, 6


def colour_files(out: Path) -> Path:
    """A picture's colour says which characters are wanted: red for digits, blue for capitals."""
    make_vlm(out / "model", "qwen2_5_vl")
    shutil.copy(tiny_reward.__file__, out / "reward.py")
    rows = []
    for number in range(32):
        colour, answer = (("red", "digits"), ("blue", "capitals"))[number % 2]
        (out / f"{number}.png").write_bytes(coloured(colour, 28 + 28 * (number // 2 % 2)))
        prompt = [{"role": "user", "content": "<image>?"}]
        rows.append({"prompt": prompt, "images": [f"{number}.png"], "answer": answer})
    (out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def colour_recipe(files: Path, out: Path, steps: int, **sections: dict[str, Any]) -> Recipe:
    base: dict[str, Any] = {
        "data": {
            "train": str(files / "prompts.jsonl"),
            "image_key": "images",
            "batch_size": BATCH,
            "max_length": 64,
            "tokens_per_micro_batch": 2048,
        },
        "rollout": {"n": N, "max_tokens": MAX_TOKENS},
        "optimizer": {"lr": 3e-3},
        "trainer": {"steps": steps},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return online_recipe(files, out, "cpu", **base)
