"""Updates a mixture of experts in vLLM and prints what it found: `python vllm_mixture_child.py WORK KIND`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from isotrain.data.prepare.tiny import make_tiny
from isotrain.errors import WeightUpdateError
from isotrain.models.conversion import Publisher, stored_buffers
from isotrain.rollout.vllm import VllmEngine
from isotrain.weights.file import write_update

SEQUENCES = [np.arange(5, 5 + length, dtype=np.int32) for length in (3, 9, 30)]


def forward(model: Any, tokens_T: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(tokens_T).long()[None]
    with torch.no_grad():
        logp_TV = model(ids).logits[0, :-1].log_softmax(-1)
    return np.asarray(logp_TV.gather(1, ids[0, 1:, None])[:, 0])


def main(work: Path, kind: Any) -> None:
    make_tiny(work, train_rows=2, validation_rows=2, architecture=kind)
    model: Any = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    publish, own = Publisher(model), {**dict(model.named_parameters()), **stored_buffers(model)}
    engine = VllmEngine(
        work / "model",
        name="e",
        dtype="float32",
        device_type="cpu",
        max_length=64,
        cache_bytes=1 << 28,
        update_timeout=60.0,
    )

    def difference() -> float:
        found = engine.logps(SEQUENCES)
        return max(float(np.abs(forward(model, s) - f).mean()) for s, f in zip(SEQUENCES, found, strict=True))

    def published() -> dict[str, torch.Tensor]:
        return {n: t for name, tensor in own.items() for n, t in publish(name, tensor.detach())}

    differences, moved = [difference()], []
    for version in range(1, 4):
        before = forward(model, SEQUENCES[-1])
        draw = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for tensor in own.values():
                tensor += 0.05 * torch.randn(tensor.shape, generator=draw)
        moved.append(float(np.abs(forward(model, SEQUENCES[-1]) - before).mean()))
        engine.update_weights(write_update(published().items(), version))
        differences.append(difference())
    refused = ""
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    try:
        engine.update_weights(write_update(((n, t) for n, t in published().items() if n != gone), 4))
    except WeightUpdateError as error:
        refused = str(error)
    engine.update_weights(write_update(published().items(), 5))
    differences.append(difference())
    engine.close()
    print(json.dumps({"differences": differences, "moved": moved, "refused": refused}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
