"""How long the light commands take to start.

`ratio` is the processor time of the slowest command over what it may take, in the median over the turns:
half a second for `isotrain --help`, a second for commands that read a recipe or a run. Processor time is that
of the process and its children: other work on a machine adds to the time on the wall, and less to it. Both
are printed. Each turn starts every command once; with `--before DIR` also with the code of another checkout.

    python benchmarks/startup.py
    git worktree add ../before COMMIT && python benchmarks/startup.py --before ../before
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import bench

# Seconds of processor time that a command may take.
LIMITS: dict[str, float] = {
    "--help": 0.5,
    "--version": 0.5,
    "recipes": 1.0,
    "recipes tiny-sft": 1.0,
    "runs .": 1.0,
    "logs no-such-run": 1.0,
    "train --help": 1.0,
    "train tiny-sft --dry-run": 1.5,
    "plan --help": 1.0,
    "parity --help": 0.5,
    "parity compare --help": 1.0,
    "import --help": 1.0,
    "doctor --help": 1.0,
    "view --help": 1.0,
    "export --help": 1.0,
    "prepare tiny --help": 1.0,
}


def start(source: Path, command: str, work: Path) -> tuple[float, float]:
    """Seconds of processor time and on the wall."""
    before, clock = os.times(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "isotrain", *command.split()],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(source / "src")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=120,
    )
    wall, after = time.perf_counter() - clock, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return used, wall


def main() -> None:
    parser = bench.Options(__doc__, turns=2)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--before", type=Path, help="another checkout")
    options = parser.read()
    sides = {"now": bench.REPOSITORY, **({"before": options.before} if options.before else {})}
    seconds: dict[str, dict[str, list[tuple[float, float]]]] = {side: defaultdict(list) for side in sides}
    with tempfile.TemporaryDirectory() as directory:
        for turn in range(options.turns + 1):
            for command in LIMITS:
                for side, source in sides.items():
                    measured = start(source, command, Path(directory))
                    if turn:  # the first fills caches of files
                        seconds[side][command].append(measured)
            if turn:
                report(seconds)


def report(seconds: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    def medians(side: str, at: int) -> dict[str, float]:
        measured = seconds[side].items()
        return {
            command: round(statistics.median(pair[at] for pair in pairs), 2) for command, pairs in measured
        }

    shares = {command: used / LIMITS[command] for command, used in medians("now", 0).items()}
    slowest = max(shares, key=lambda command: shares[command])
    earlier = {"before_s": medians("before", 0)} if "before" in seconds else {}
    bench.report(
        "startup",
        shares[slowest],
        1.0,
        shares[slowest] <= 1.0,
        ratios=bench.spread([used / LIMITS[slowest] for used, _ in seconds["now"][slowest]]),
        slowest=slowest,
        processor_s=medians("now", 0),
        wall_s=medians("now", 1),
        **earlier,
    )


if __name__ == "__main__":
    main()
