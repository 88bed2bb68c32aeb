"""The chains of docs/preference.md, as they are written there: SFT, then DPO or a reward model and PPO."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from isotrain.observe.metrics import read_metrics
from support import command, needs_vllm

PAGE = Path(__file__).parents[2] / "docs" / "preference.md"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    needs_vllm,
]


def commands() -> list[str]:
    """Every line of the section's listings."""
    section = PAGE.read_text().split("## Chains")[1].split("\n## ")[0]
    return [line for block in re.findall(r"```bash\n(.*?)```", section, re.S) for line in block.splitlines()]


def test_the_chains_learn(tmp_path: Path) -> None:
    for line in commands():
        program, *words = shlex.split(line)
        assert program == "isotrain"
        done = subprocess.run(
            command(*words), cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    runs = {
        name: read_metrics(tmp_path / "runs" / f"chain-{name}" / "metrics.jsonl")
        for name in ("dpo", "rm", "ppo")
    }
    assert runs["dpo"][-1]["val/accuracy"] > 0.9
    assert runs["rm"][-1]["val/accuracy"] > 0.9
    # Of a response as it was asked for, the spaces earn nothing.
    true = [row["reward/function/mean"] for row in runs["ppo"]]
    first, last = sum(true[:3]) / 3, sum(true[-5:]) / 5
    print(f"true reward of the first 3 steps {first:.3f}, of the last 5 {last:.3f}")
    assert first < 0.25 and last > 0.35
