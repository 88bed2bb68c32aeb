"""Counts the groups that a training step uses on a rank: `python communicator_ranks.py MODEL`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from isotrain.device.detect import choose_device
from isotrain.engine.world import join_world
from isotrain.recipe.schema import MeshSection, Recipe
from isotrain.tools.plan.step import run_step

RANKS = 4
# The model has two heads: four ranks split them over two, and form rings of two.
MESHES: dict[str, dict[str, Any]] = {
    "data": {},
    "ulysses": {"context": 2, "context_attention": "ulysses"},
    "ring": {"context": 4, "context_attention": "ring"},
    "both": {"context": 4, "context_attention": "auto"},
}
DATA = {"train": "rows.jsonl", "max_length": 64, "tokens_per_micro_batch": 128}


def recipe(model: str, mesh: dict[str, Any]) -> Recipe:
    section = {"path": model, "dtype": "float32", "attention": "sdpa", "fused": "off"}
    device = {"type": "npu", "ranks": RANKS, "mesh": mesh}
    sections = {"data": DATA, "device": device, "model": section, "algorithm": {"name": "sft"}}
    return Recipe.model_validate({"name": "count", "output": "runs/count", **sections})


def exchanged() -> dict[str, int]:
    """How often each group has exchanged something on the device."""
    groups = dist.distributed_c10d._world.pg_map
    backends = {g.group_name: g._get_backend(torch.device("npu")) for g in groups if g.size() > 1}
    return {name: backend._get_sequence_number_for_group() for name, backend in backends.items()}


def main(model: str) -> None:
    device, counted = choose_device("npu"), {}
    to_one: Counter[str] = Counter()
    batch = dist.batch_isend_irecv

    def noted(operations: list[Any]) -> Any:
        to_one.update(str(operation.group.group_name) for operation in operations)
        return batch(operations)

    dist.batch_isend_irecv = noted

    @contextmanager
    def nothing(_: object) -> Iterator[None]:
        yield

    with join_world(device) as world:
        for name, mesh in MESHES.items():
            before = exchanged()
            to_one.clear()
            shaped = replace(world, shape=MeshSection.model_validate(mesh), _context_groups={})
            run_step(recipe(model, mesh), device, shaped, 1, nothing)
            # A group's number counts what goes from one rank to another as well.
            used = {g: n - before.get(g, 0) - to_one[g] for g, n in exchanged().items()}
            counted[name] = [sum(number > 0 for number in used.values()), len(to_one)]
    print(json.dumps(counted))


if __name__ == "__main__":
    main(sys.argv[1])
