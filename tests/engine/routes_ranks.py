"""Log-probs with forced routes on a mesh: `python routes_ranks.py MODEL OUT CONTEXT EXPERT`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from isotrain.data.items import Sample
from isotrain.data.packing import pack_shared
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.world import join_world
from isotrain.models.routes import RouteReplay
from isotrain.recipe.schema import MeshSection, ModelSection, OptimizerSection

LENGTHS, PROMPT = (9, 14, 11), 5


def main(model: str, out: Path, context: int, expert: int) -> None:
    draw = np.random.default_rng(0)
    samples = [Sample(np.arange(5, 5 + n, dtype=np.int32), np.arange(n) >= PROMPT) for n in LENGTHS]
    routes = [np.argsort(draw.random((n, 2, 8)), axis=-1)[..., :2].astype(np.int16) for n in LENGTHS]
    routes[1][-3:] = -1
    batch = pack_shared(samples, [PROMPT] * len(LENGTHS), routes)
    device, section = choose_device("cpu"), ModelSection(path=model, dtype="float32")
    with join_world(device, shape=MeshSection(context=context, expert=expert)) as world:
        optimizer = OptimizerSection(betas=(0.5, 0.9), max_grad_norm=0, weight_decay=0)
        engine = build_engine(section, optimizer, device=device, world=world, seed=0)
        engine.model.replay = RouteReplay(engine.model.pretrained)
        (logp_N,) = engine.infer([batch], lambda head: head.logps())
        copies = world.size // context  # each of them computes the same micro-batch
        result = engine.update([(batch, lambda head: (head.logps().sum() / copies, {}))], lr=1e-3)
        values = {"logp": logp_N.contiguous(), "norm": torch.tensor(result.grad_norm)}
        save_file(values, out / f"{world.rank}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
