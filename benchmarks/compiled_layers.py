"""Time of an SFT update with compiled layers over one without, on the CPU, in turns.

A model of four layers with SmolLM2's width, 2,048 tokens, float32. `ratio` is the median over the turns.
Lower is better. `first_seconds` is the first update, which compiles.

    python benchmarks/compiled_layers.py [--turns 5]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import bench

GOAL = 1.0


def measure(options: argparse.Namespace, model: str) -> None:
    import numpy as np

    from isotrain.algorithms.sft import sft_loss
    from isotrain.data.items import Sample
    from isotrain.data.packing import pack
    from isotrain.device.detect import choose_device
    from isotrain.engine.build import build_engine
    from isotrain.engine.world import join_world
    from isotrain.recipe.schema import ModelSection, OptimizerSection

    device = choose_device("cpu")
    length = options.tokens // 4
    rows = np.random.default_rng(0).integers(3, 500, (4, length)).astype(np.int32)
    batch = pack([Sample(tokens_T, np.ones(length, np.bool_)) for tokens_T in rows])
    seconds: dict[bool, list[float]] = {False: [], True: []}
    first: dict[bool, float] = {}
    with join_world(device) as world:
        engines: dict[bool, Any] = {}
        for compiled in (False, True):
            section = ModelSection(path=model, dtype="float32", compile=compiled)
            engines[compiled] = build_engine(section, OptimizerSection(), device=device, world=world, seed=0)
        for turn in range(options.turns + 1):
            for compiled, engine in engines.items():
                started = time.perf_counter()
                engine.step([batch], sft_loss, 1e-5)
                took = time.perf_counter() - started
                if turn:
                    seconds[compiled].append(took)
                else:
                    first[compiled] = round(took, 1)
    ratios = [b / a for a, b in zip(seconds[False], seconds[True], strict=True)]
    spread = bench.spread(ratios)
    met = spread["median"] <= GOAL
    bench.report("compiled_layers", spread["median"], GOAL, met, ratios=spread, first_seconds=first)


def main() -> None:
    parser = bench.Options(__doc__, turns=2, tokens=512)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.read()
    from isotrain.data.prepare.tiny import make_tiny

    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        make_tiny(out, hidden=576, heads=9, kv_heads=3, layers=4, train_rows=1, validation_rows=1)
        measure(options, str(Path(directory) / "model"))


if __name__ == "__main__":
    main()
