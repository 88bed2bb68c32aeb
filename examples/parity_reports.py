"""Three reports to look at: equivalent, different and inconclusive, from made-up logs of 200 steps.

    python examples/parity_reports.py DIR

Each directory below DIR gets two logs as CSV and a report.html that opens in any browser.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

STEPS, NOISE, AUTOCORRELATION = 200, 0.03, 0.8


def rewards(seed: int, lower: float = 0.0, steps: int = STEPS, noise: float = NOISE) -> np.ndarray:
    """A reward that rises from 0.2 to 0.7, with noise that a step shares with the one before."""
    draw = np.random.default_rng(seed)
    shocks = draw.normal(0, noise * np.sqrt(1 - AUTOCORRELATION**2), steps)
    noise_S = np.zeros(steps)
    for step in range(1, steps):
        noise_S[step] = AUTOCORRELATION * noise_S[step - 1] + shocks[step]
    rise_S = 0.2 + 0.5 * (1 - np.exp(-np.arange(steps) / 60))
    return rise_S - lower + noise_S


CASES = {
    "equivalent": (rewards(1), rewards(2)),
    "different": (rewards(1), rewards(2, lower=0.1)),
    "inconclusive": (rewards(1, steps=40, noise=0.12), rewards(5, steps=40, noise=0.12)),
}


def write(path: Path, reward_S: np.ndarray) -> Path:
    rows = [f"{step},{reward:.6f}" for step, reward in enumerate(reward_S, start=1)]
    path.write_text("\n".join(["step,reward", *rows]) + "\n")
    return path


def main(out: Path) -> None:
    for name, (here_S, there_S) in CASES.items():
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        runs = [write(folder / "here.csv", here_S), write(folder / "there.csv", there_S)]
        report = ["--free", "--report", str(folder / "report")]
        done = subprocess.run(
            [sys.executable, "-m", "isotrain", "parity", "compare", *map(str, runs), *report]
        )
        print(f"\n{name}: exit code {done.returncode}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
