"""Time of an update whose layers are recorded over that of a plain one, on the tiny model. Smaller is better.

Updates of one engine take turns: a plain one, one with `observe.layer_trace` looking on, one with the score
tests of the first step as well (`tested`), and one after all have gone, whose share of a plain one's time is
`afterwards`. A traced update is one of the first few of a run, so
that the goal is about waiting for a diagnosis and not about training.

    python benchmarks/layer_trace_overhead.py [--dtype float32|bfloat16] [--turns 15] [--device cpu]
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import bench
import numpy as np

GOAL, AFTERWARDS = 5.0, 1.05
SAMPLES, LENGTH = 8, 128


def tell(seconds: dict[str, list[float]], dtype: str, size: int) -> None:
    shares = {
        name: bench.spread([a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)])
        for name in ("traced", "tested", "afterwards")
    }
    bench.report(
        f"layer_trace_overhead {dtype}",
        shares["traced"]["median"],
        goal=GOAL,
        met=shares["traced"]["median"] <= GOAL and shares["afterwards"]["median"] <= AFTERWARDS,
        ratios=shares["traced"],
        tested=shares["tested"],
        afterwards=shares["afterwards"],
        step_s={name: bench.spread(values) for name, values in seconds.items()},
        tokens_per_step=SAMPLES * LENGTH,
        bytes_per_step=size,
    )


def main() -> None:
    parser = bench.Options(__doc__, turns=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    options = parser.read()
    from isotrain.algorithms.sft import sft_loss
    from isotrain.data.items import Sample
    from isotrain.data.packing import pack
    from isotrain.data.prepare.tiny import make_tiny
    from isotrain.device.detect import choose_device
    from isotrain.engine.build import build_engine
    from isotrain.engine.world import join_world
    from isotrain.recipe.schema import ModelSection, OptimizerSection
    from isotrain.tools.probes.layer_trace import LayerTrace
    from isotrain.tools.probes.score_tests.recorder import ScoreTestRecorder

    draw = np.random.default_rng(0)
    every = np.ones(LENGTH, np.bool_)
    batch = pack([Sample(draw.integers(3, 500, LENGTH).astype(np.int32), every) for _ in range(SAMPLES)])
    seconds: dict[str, list[float]] = {"plain": [], "traced": [], "tested": [], "afterwards": []}
    device = choose_device(options.device)
    with tempfile.TemporaryDirectory() as directory, join_world(device) as world:
        tiny, traces = Path(directory) / "tiny", Path(directory) / "layer_trace"
        make_tiny(tiny, train_rows=8, validation_rows=8, layers=options.layers, hidden=options.hidden)
        model = ModelSection(path=str(tiny / "model"), dtype=options.dtype)
        engine = build_engine(model, OptimizerSection(), device=device, world=world, seed=0)

        def update() -> float:
            started = time.perf_counter()
            engine.step([batch], sft_loss, 1e-4)
            device.synchronize()
            return time.perf_counter() - started

        for turn in range(options.turns + 1):
            measured = {"plain": update()}
            engine.probes = [LayerTrace(traces, steps=1)]
            measured["traced"] = update()
            engine.probes = [LayerTrace(traces, steps=1), ScoreTestRecorder(Path(directory) / "score_tests")]
            measured["tested"] = update()
            measured["afterwards"] = update()
            if turn:  # the first one warms up
                for name, value in measured.items():
                    seconds[name].append(value)
                tell(seconds, options.dtype, sum(file.stat().st_size for file in traces.iterdir()))


if __name__ == "__main__":
    main()
