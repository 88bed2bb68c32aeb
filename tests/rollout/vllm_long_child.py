"""Runs vLLM on sequences beyond a model's own limit, prompts read at once or in parts; prints JSON.

`python vllm_long_child.py WORK at_once|in_parts` makes a tiny model with YaRN in WORK.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.cpu import Cpu
from isotrain.recipe.online import RolloutSection
from isotrain.rollout import vllm
from isotrain.rollout.build import build_rollout

OWN, FACTOR, PART = 64, 4.0, 48
LENGTHS = (30, 100, 200, 251)


def make_model(work: Path) -> Path:
    make_tiny(work, hidden=128, vocab=500, train_rows=2, validation_rows=2)
    directory = work / "model"
    config = json.loads((directory / "config.json").read_text())
    config["max_position_embeddings"] = OWN
    config["rope_parameters"] = {
        "rope_type": "yarn",
        "factor": FACTOR,
        "original_max_position_embeddings": OWN,
        "rope_theta": 10000.0,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def main(work: Path, how: str) -> dict[str, Any]:
    directory = make_model(work)
    in_parts = how == "in_parts"
    with (
        mock.patch.object(vllm, "_reads_in_parts", lambda platform: in_parts),
        mock.patch.object(vllm, "PREFILL_TOKENS", PART),
    ):
        engine: Any = build_rollout(
            RolloutSection(
                engine="vllm", max_tokens=4, kv_cache_gb=0.25, eager=True, load_format="safetensors"
            ),
            str(directory),
            "float32",
            device=Cpu(),
            max_prompt=int(OWN * FACTOR) - 4,
            seed=0,
            name="engine 7",
        )
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    drawn = np.random.default_rng(0)
    sequences = [drawn.integers(5, 495, length).astype(np.int32) for length in LENGTHS]
    steps, step = [0], engine._engine.step

    def counted() -> Any:
        steps[0] += 1
        return step()

    engine._engine.step = counted
    found = engine.logps(sequences)
    with torch.no_grad():
        ids = [torch.from_numpy(tokens_T).long()[None] for tokens_T in sequences]
        expected = [
            model(one).logits[0, :-1].log_softmax(-1).gather(1, one[0, 1:, None])[:, 0].numpy() for one in ids
        ]
    config = engine._engine.vllm_config.scheduler_config
    difference = max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))
    engine.close()
    return {"difference": difference, "steps": steps[0], "batched": config.max_num_batched_tokens}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
