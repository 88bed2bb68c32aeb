"""Writing a rank's checkpoint file in one pass, against writing it and reading it back for its SHA-256.

Lower is better. Both write the same float32 tensors (`--megabytes` in all), flush them to disk and know size
and SHA-256 at the end. The first way is that of checkpoints: each block is hashed when it was written. The
second is safetensors' `save_file`, followed by reading the file, which is then in the page cache. The order
changes from turn to turn. `ratio` is the median over turns of the time of the first over that of the second.

`host_memory` is what a checkpoint's writer takes beside the state, at its peak and over the state's size:
of a state that is in host memory already, as in colocated runs, and of one that is on a device (or changes
while it is written), which is copied once. Each is measured in a process of its own.

    python benchmarks/checkpoint_writing.py [--turns 9] [--megabytes 1024] [--directory DIR]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench
import torch
from safetensors.torch import save_file

from isotrain.engine.checkpoint.layout import sha256_of, sync
from isotrain.engine.checkpoint.tensor_file import write_tensors
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.models.weights import Shard

GOAL = 1.0
TENSOR_BYTES = 16 << 20


def in_one_pass(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[int, str]:
    with path.open("wb") as file:
        written = write_tensors(file, tensors, {"format": "pt"})
        file.flush()
        os.fsync(file.fileno())
    return written.size, written.sha256


def read_back(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[int, str]:
    save_file(tensors, path, metadata={"format": "pt"})
    sync(path)
    return path.stat().st_size, sha256_of(path)


WAYS = {"one_pass": in_one_pass, "read_back": read_back}


def host_memory(copied: bool, megabytes: int) -> float:
    """Memory that a writer takes at its peak, over that of the state."""
    command = [sys.executable, __file__, "--memory", str(int(copied)), "--megabytes", str(megabytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return float(done.stdout.splitlines()[-1])


def write_once(copied: bool, megabytes: int) -> float:
    state = {"weights": torch.ones(megabytes << 18), "moments": torch.ones(megabytes << 18)}
    shards = {name: Shard(tensor, tuple(tensor.shape), (0,)) for name, tensor in state.items()}
    with tempfile.TemporaryDirectory() as directory:
        writer = CheckpointWriter(Path(directory), 0, 1, keep=1)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
        before = _resident("VmHWM")
        writer.save(1, shards, {}, {}, copied=copied)
        writer.wait()
        assert writer.failure() is None, "nothing was written"
        return (_resident("VmHWM") - before) / sum(tensor.nbytes for tensor in state.values())


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) << 10


def main() -> None:
    parser = bench.Options(__doc__, turns=5, megabytes=128)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--directory", help="where to write; default: the directory of temporary files")
    options = parser.read()
    if options.memory:
        print(write_once(options.memory == "1", options.megabytes))
        return
    memory = {
        "state in host memory": round(host_memory(True, options.megabytes), 3),
        "state on a device": round(host_memory(False, options.megabytes), 3),
    }
    count = max(1, (options.megabytes << 20) // TENSOR_BYTES)
    # Names in the order of safetensors, so that both files hold the same bytes.
    tensors = {f"weights/{n:05d}": torch.randn(TENSOR_BYTES // 4) for n in range(count)}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for turn in range(-1, options.turns):  # the first one warms up
            results = {}
            for name in sorted(WAYS, reverse=bool(turn % 2)):
                path = Path(directory) / name
                began = time.perf_counter()
                results[name] = WAYS[name](path, tensors)
                took = time.perf_counter() - began
                path.unlink()
                if turn >= 0:
                    seconds[name].append(took)
            assert results["one_pass"] == results["read_back"], "the files differ"
            if turn >= 0:
                tell(seconds, count, memory)


def tell(seconds: dict[str, list[float]], count: int, memory: dict[str, float]) -> None:
    ratios = [new / old for new, old in zip(seconds["one_pass"], seconds["read_back"], strict=True)]
    spread = bench.spread(ratios)
    bench.report(
        "checkpoint_writing",
        spread["median"],
        goal=GOAL,
        met=spread["median"] < GOAL,
        ratios=spread,
        host_memory=memory,
        megabytes=count * TENSOR_BYTES >> 20,
        **{f"{name}_s": bench.spread(values) for name, values in seconds.items()},
    )


if __name__ == "__main__":
    main()
