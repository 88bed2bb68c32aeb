"""An update on two ranks of which one has no picture: `vision_ranks.py DEVICE MODEL OUT VISION`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from isotrain.data.packing import pack
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.world import join_world
from isotrain.recipe.schema import ModelSection, OptimizerSection
from isotrain.weights.send import full_weights
from vision_models import samples_of


def run(device_type: str, model: Path, out: Path, vision: str) -> None:
    device = choose_device(device_type)
    section = ModelSection.model_validate(
        {"path": str(model), "dtype": "float32", "attention": "sdpa", "vision": vision}
    )
    samples, _ = samples_of(model)
    with join_world(device) as world:
        # The last two have no picture.
        parts = [samples[:4], samples[4:]]
        batches = [pack(part) for part in (parts if world.size == 1 else [parts[world.rank]])]
        optimizer = OptimizerSection(lr=1e-3, betas=(0.5, 0.9), max_grad_norm=0, weight_decay=0.1)
        engine = build_engine(section, optimizer, device=device, world=world, seed=0)
        (*logps,) = engine.infer(batches, lambda head: head.logps())
        result = engine.step(batches, lambda head, tokens: head.nll_share(tokens), 1e-3)
        values = {"loss": torch.tensor(result.loss), "norm": torch.tensor(result.grad_norm)}
        moments = {
            f"moment/{name}": (m.full_tensor() if hasattr(m, "full_tensor") else m).cpu().contiguous()
            for name, p in engine.trained.items()
            for m in [engine.optimizer.state[p]["exp_avg"]]
        }
        weights = {name: t.cpu().contiguous() for name, t in full_weights(engine, torch.float32)}
        own = {f"logps/{world.rank}": torch.cat(logps).cpu()}
        save_file({**values, **moments, **weights, **own}, out / f"{world.size}-{world.rank}.safetensors")


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
