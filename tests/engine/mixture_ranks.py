"""What each rank streams to engines: `python mixture_ranks.py DEVICE MODEL OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.world import join_world
from isotrain.recipe.schema import ModelSection, OptimizerSection
from isotrain.weights.send import full_weights


def main(device_type: str, model: str, out: Path) -> None:
    device, section = choose_device(device_type), ModelSection(path=model, dtype="float32", fused="off")
    with join_world(device) as world:
        engine = build_engine(section, OptimizerSection(), device=device, world=world, seed=0)
        tensors = {name: t.cpu().contiguous() for name, t in full_weights(engine, torch.float32)}
        save_file(tensors, out / f"{world.rank}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
