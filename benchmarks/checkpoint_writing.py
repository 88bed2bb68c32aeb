"""Writing a rank's checkpoint file in one pass, against writing it and reading it back for its SHA-256.

Lower is better. Both write the same float32 tensors (`--megabytes` in all), flush them to disk and know size
and SHA-256 at the end. The first way is that of checkpoints: each block is hashed when it was written. The
second is safetensors' `save_file`, followed by reading the file, which is then in the page cache. The order
changes from turn to turn. `ratio` is the median over turns of the time of the first over that of the second.

    python benchmarks/checkpoint_writing.py [--turns 9] [--megabytes 1024] [--directory DIR]
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import bench
import torch
from safetensors.torch import save_file

from isotrain.engine.checkpoint.layout import sha256_of, sync
from isotrain.engine.checkpoint.tensor_file import write_tensors

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


def main() -> None:
    parser = bench.Options(__doc__, turns=5, megabytes=128)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--directory", help="where to write; default: the directory of temporary files")
    options = parser.read()
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
                tell(seconds, count)


def tell(seconds: dict[str, list[float]], count: int) -> None:
    ratios = [new / old for new, old in zip(seconds["one_pass"], seconds["read_back"], strict=True)]
    spread = bench.spread(ratios)
    bench.report(
        "checkpoint_writing",
        spread["median"],
        goal=GOAL,
        met=spread["median"] < GOAL,
        ratios=spread,
        megabytes=count * TENSOR_BYTES >> 20,
        **{f"{name}_s": bench.spread(values) for name, values in seconds.items()},
    )


if __name__ == "__main__":
    main()
