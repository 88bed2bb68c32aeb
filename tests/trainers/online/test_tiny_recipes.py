"""The shipped recipes that learn from rewards end where a policy that does the task ends."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from support import command

# More seeds: ISOTRAIN_SEEDS="1 2 3 4 5 6 7 8 9 10".
SEEDS = [int(seed) for seed in os.environ.get("ISOTRAIN_SEEDS", "1 2").split()]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "least"), [("tiny-grpo", 0.95), ("tiny-agent", 0.95), ("tiny-vision-grpo", 0.8)]
)
def test_learns_the_task(tmp_path: Path, name: str, least: float, seed: int) -> None:
    """With the reference engine: of a policy that ignores the tool, or the prompt, 0.77 is the most.

    Of one that ignores the picture it is about 0.5.
    """
    what = ("--vision", "--out", "work/tiny-vision") if "vision" in name else ("--out", "work/tiny")
    subprocess.run(command("prepare", "tiny", *what), cwd=tmp_path, check=True)
    changes = (f"seed={seed}", "rollout.engine=hf", "cluster.address=local")
    subprocess.run(command("train", name, *changes), cwd=tmp_path, check=True)
    run = tmp_path / "runs" / name
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["val-core/data/reward/mean@1"] >= least
    assert any((run / "trajectories").iterdir())
