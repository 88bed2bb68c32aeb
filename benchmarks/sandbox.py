"""Programs in bubblewrap against the same programs in plain subprocesses. Lower is better.

Each turn runs the same short Python program `--programs` times in each way, one after the other, by turns in
either order; `ratio` is the median over turns of the time in bubblewrap over that in a subprocess. Both use
the same interpreter. `sandbox_ms` and `plain_ms` are per program; `per_second` is the throughput of
bubblewrap with `--threads` programs at a time, and `plain_per_second` that of subprocesses.

    python benchmarks/sandbox.py [--turns 15] [--programs 20] [--threads 2]
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import bench

from isotrain.process.bubblewrap import Bubblewrap
from isotrain.process.sandbox import Limits

PROGRAM = "print(sum(map(int, input().split())))"
STDIN = "1 2 3\n"
EXPECTED = "6\n"
# One that programs in the sandbox can use, whoever runs this.
PYTHON = "/usr/bin/python3"
GOAL = 3.0


def plain() -> None:
    done = subprocess.run(
        [PYTHON, "-s", "-B", "-c", PROGRAM], input=STDIN, capture_output=True, text=True, check=True, env={}
    )
    assert done.stdout == EXPECTED


def seconds(run: Callable[[], None], count: int, threads: int) -> float:
    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(run) for _ in range(count)]:
            done.result()
    return (time.perf_counter() - begun) / count


def main() -> None:
    parser = bench.Options(__doc__, turns=3, programs=5)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.read()
    sandbox = Bubblewrap(Limits(), PYTHON)
    sandbox.start()

    def confined() -> None:
        assert sandbox.run(PROGRAM, STDIN).stdout == EXPECTED

    kinds: dict[str, Callable[[], None]] = {"sandbox": confined, "plain": plain}
    alone: dict[str, list[float]] = {name: [] for name in kinds}
    together: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(options.turns):
        for name in sorted(kinds, reverse=bool(turn % 2)):
            alone[name].append(seconds(kinds[name], options.programs, 1))
            together[name].append(seconds(kinds[name], options.programs, options.threads))
        ratios = bench.spread([a / b for a, b in zip(alone["sandbox"], alone["plain"], strict=True)])
        bench.report(
            "sandbox",
            ratios["median"],
            goal=GOAL,
            met=ratios["median"] <= GOAL,
            ratios=ratios,
            sandbox_ms=bench.spread([1000 * one for one in alone["sandbox"]]),
            plain_ms=bench.spread([1000 * one for one in alone["plain"]]),
            overhead_ms=round(
                1000 * median(a - b for a, b in zip(alone["sandbox"], alone["plain"], strict=True)), 2
            ),
            threads=options.threads,
            per_second=bench.spread([1 / one for one in together["sandbox"]]),
            plain_per_second=bench.spread([1 / one for one in together["plain"]]),
        )


if __name__ == "__main__":
    main()
