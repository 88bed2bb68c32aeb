"""The digest of what engines would be sent: `python split_experts_ranks.py MODEL CHECKPOINTS OUT EXPERT`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.checkpoint.reader import newest_valid
from isotrain.engine.state import restore
from isotrain.engine.world import join_world
from isotrain.recipe.schema import MeshSection, ModelSection, OptimizerSection
from isotrain.weights.file import write_update
from isotrain.weights.send import full_weights


def main(model: str, checkpoints: Path, out: Path, expert: int) -> None:
    device, section = choose_device("cpu"), ModelSection(path=model, dtype="float32")
    with join_world(device, shape=MeshSection(expert=expert)) as world:
        engine = build_engine(section, OptimizerSection(), device=device, world=world, seed=0)
        reader, _ = newest_valid(checkpoints, world)
        assert reader is not None
        restore(engine, device, reader)
        update = write_update(full_weights(engine, torch.float32), reader.step, out)
        (out / f"{world.rank}.txt").write_text(update.digest)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
