"""Log-probs of models with scaled or capped logits: `capped_heads_child.py DIRECTORY ENGINE DTYPE KIND ...`.

Prints for each the largest difference between the packed log-probs of the trainer and those of the engine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.world import join_world
from isotrain.recipe.online import RolloutSection
from isotrain.recipe.schema import ModelSection, OptimizerSection
from isotrain.rollout.build import build_rollout
from isotrain.weights.file import write_update
from isotrain.weights.send import full_weights
from small_models import save_small

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 32,
    },
    "gemma3_text": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 32},
    "gemma4_text": {"final_logit_softcapping": 3.0, "global_head_dim": 32},
    "cohere": {"logit_scale": 0.3, "hidden_size": 128},
    # vLLM shows a layer one token more than the window, transformers does not: longer than the samples.
    "cohere2": {"logit_scale": 0.3, "sliding_window": 64},
    "granite": {"logits_scaling": 3.0, "hidden_size": 128},
    "granitemoe": {"logits_scaling": 3.0, "hidden_size": 128},
}
LENGTHS = (9, 2, 20, 14)


def difference(kind: str, directory: Path, engine_name: str, dtype: str, wide: bool) -> dict[str, float]:
    save_small(kind, directory, **(SIZES | KINDS[kind]))
    device = choose_device("cpu")
    section = RolloutSection.model_validate(
        {"engine": engine_name, "max_tokens": 8, "kv_cache_gb": 0.1, "tensor_parallel": 1}
    )
    values = {"path": str(directory), "dtype": dtype, "head_dtype": "float32" if wide else "model"}
    tokens_T = torch.randint(3, 50, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    starts = np.cumsum((0, *LENGTHS[:-1]))
    predict_N = torch.cat([torch.arange(s, s + n - 1) for s, n in zip(starts, LENGTHS, strict=True)])
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    with join_world(device) as world:
        trainer = build_engine(
            ModelSection.model_validate(values), OptimizerSection(), device=device, world=world, seed=0
        )
        with torch.no_grad():
            for p in trainer.model.parameters():  # other weights than the engine has read
                p.mul_(1.05)

            def trained_N() -> torch.Tensor:
                pack = (tokens_T, positions_T, LENGTHS, predict_N, tokens_T[predict_N + 1])
                logp_N: torch.Tensor = trainer.model.eval()(*pack, lambda head: head.logps())
                return logp_N

            logp_N = trained_N()
            trainer.model.transform = type(trainer.model.transform)()
            without_N = trained_N()
        weights = {name: p.clone() for name, p in full_weights(trainer, getattr(torch, dtype))}
    # Outside of the trainer's process group: an engine makes its own.
    engine = build_rollout(
        section,
        str(directory),
        dtype,
        device=device,
        max_prompt=40,
        seed=0,
        name="e",
        head_float32=wide,
    )
    engine.update_weights(write_update(weights.items(), 1))
    samples = [sample.numpy().astype(np.int32) for sample in tokens_T.split(LENGTHS)]
    theirs = torch.from_numpy(np.concatenate(engine.logps(samples)))
    engine.close()
    return {
        "difference": float((logp_N - theirs).abs().max()),
        "without": float((without_N - theirs).abs().max()),
    }


if __name__ == "__main__":
    root, engine_name, dtype, *kinds = sys.argv[1:]
    for kind in kinds or KINDS:
        try:
            result = difference(kind, Path(root) / kind, engine_name, dtype, wide=dtype != "float32")
        except Exception as error:
            result = {"error": repr(error)[:300]}
        print(json.dumps({"kind": kind, **result}), flush=True)
