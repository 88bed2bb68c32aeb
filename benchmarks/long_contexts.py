"""Device memory of a rank that computes a long sample with others, against a sample that much shorter.

One update of SFT on one sample, on the simulated npu, whose counter of memory is exact: `--lengths` tokens
over 1, 2 and 4 ranks with `device.mesh.context`. `ratio` is the largest of peak memory over that of the
shortest sample on one rank, each divided by its tokens per rank: 1 means that N ranks hold N times as many
tokens. Lower is better. What a rank holds beside activations (weights, optimizer) is small in this model; it
weighs more in samples as short as those of `--quick`, whose goal is 1.2.

`overhead` is on the CPU, without a device: the time of an update of 2 samples of the shortest length with
`context: 2` over one where each of 2 ranks has a sample of its own, in turns.

    PYTHONPATH=tests/device/npusim/site python benchmarks/long_contexts.py [--lengths 32768 65536 131072]
                                                                  [--attention auto] [--turns 3]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import bench

GOAL = 1.2 if bench.QUICK else 1.15
RANKS = (1, 2, 4)
SCRIPT = str(Path(__file__).resolve())


def update(setting: dict[str, Any]) -> None:
    """A rank's side: updates, of which the last is measured."""
    import numpy as np
    import torch

    from isotrain.algorithms.sft import sft_loss
    from isotrain.data.items import Sample
    from isotrain.data.packing import pack
    from isotrain.device.detect import choose_device
    from isotrain.engine.build import build_engine
    from isotrain.engine.world import join_world
    from isotrain.recipe.schema import MeshSection, ModelSection, OptimizerSection

    torch.set_num_threads(1)
    device, mesh = choose_device(setting["device"]), MeshSection.model_validate(setting["mesh"])
    model = ModelSection(path=setting["model"], dtype="float32", logits_chunk=4096, fused="off")
    with join_world(device, shape=mesh) as world:
        engine = build_engine(model, OptimizerSection(), device=device, world=world, seed=0)
        length = setting["length"]
        tokens_T = np.random.default_rng(world.data_rank).integers(3, 500, length).astype(np.int32)
        batch = pack([Sample(tokens_T, np.ones(length, np.bool_))])
        seconds = []
        for _ in range(setting["updates"]):
            world.barrier()
            started = time.perf_counter()
            engine.step([batch] * setting["micro_batches"], sft_loss, 1e-4)
            world.barrier()
            seconds.append(time.perf_counter() - started)
        told = {"peak": device.memory().peak, "seconds": seconds[-1]}
        if world.is_main:
            Path(setting["out"]).write_text(json.dumps(told))


def run(ranks: int, **setting: Any) -> dict[str, float]:
    """The first rank's figures; all ranks have equally much."""
    from isotrain.trainers.launch import run_ranks

    with tempfile.TemporaryDirectory() as job:
        out = Path(job) / "told.json"
        run_ranks(
            (SCRIPT, "--rank", json.dumps({**setting, "out": str(out)})),
            ranks,
            Path(job),
            {"NPU_SIM_DEVICES": str(ranks)},
        )
        told: dict[str, float] = json.loads(out.read_text())
    return told


def measure(options: argparse.Namespace, model: str) -> None:
    shortest = min(options.lengths)
    peaks: dict[str, float] = {}
    per_token = 0.0
    ratios: dict[str, float] = {}
    for length in sorted(options.lengths):
        for ranks in RANKS:
            if ranks == 1 and length > shortest:
                continue  # hours for nothing new
            mesh = {"context": ranks, "context_attention": options.attention if ranks > 1 else "auto"}
            told = run(ranks, device="npu", mesh=mesh, model=model, length=length, micro_batches=1, updates=1)
            name = f"{length} tokens, {ranks} ranks"
            peaks[name] = round(told["peak"] / 2**20, 1)
            per_token = per_token or told["peak"] / length
            ratios[name] = round(told["peak"] / (length / ranks) / per_token, 4)
            worst = max(ratios.values())
            figures = {"ratios": ratios, "peak_mib": peaks, "seconds": round(told["seconds"], 1)}
            bench.report("long_contexts", worst, GOAL, worst <= GOAL, **figures)
    overheads = []
    for _ in range(options.turns):
        common = {"device": "cpu", "model": model, "length": shortest // 8, "updates": 2}
        split = run(2, mesh={"context": 2, "context_attention": options.attention}, micro_batches=2, **common)
        apart = run(2, mesh={}, micro_batches=1, **common)
        overheads.append(split["seconds"] / apart["seconds"])
        bench.report(
            "long_contexts",
            worst,
            GOAL,
            worst <= GOAL,
            ratios=ratios,
            peak_mib=peaks,
            overhead=bench.spread(overheads),
        )


def main() -> None:
    parser = bench.Options(__doc__, lengths=[2048, 4096], turns=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--attention", choices=["auto", "ulysses", "ring"], default="auto")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.read()
    if options.rank:
        update(json.loads(options.rank))
        return
    from isotrain.data.prepare.tiny import make_tiny

    with tempfile.TemporaryDirectory() as directory:
        make_tiny(Path(directory), heads=4, kv_heads=2, layers=1, train_rows=1, validation_rows=1)
        config = Path(directory) / "model" / "config.json"
        content = json.loads(config.read_text())
        config.write_text(json.dumps({**content, "max_position_embeddings": 2 * max(options.lengths)}))
        measure(options, str(Path(directory) / "model"))


if __name__ == "__main__":
    main()
