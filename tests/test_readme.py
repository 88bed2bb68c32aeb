"""README's commands for the first half hour, typed literally in a clean clone."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def typed_in(section: str) -> str:
    """The commands of one section of README."""
    text = (REPOSITORY / "README.md").read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    return "\n".join(re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL))


def run_as_a_new_user(typed: str, clone: Path, timeout: float) -> str:
    # A new user's shell: none of this project's settings.
    ours = ("ISOTRAIN", "NPU_SIM", "PYTHONPATH", "VIRTUAL")
    shell = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    shell["PATH"] = ":".join(part for part in shell["PATH"].split(":") if ".venv" not in part)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", typed],
        cwd=clone,
        env=shell,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_minutes_and_learning_from_rewards(tmp_path: Path) -> None:
    clone = tmp_path / "isotrain"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True, timeout=60)
    first = typed_in("Five minutes, offline")
    assert "isotrain train" in first
    told = run_as_a_new_user(first, clone, 1500)
    # The form of a response is learned in a minute; the sums themselves are not.
    assert re.search(r"^\d+ \S \d+ = \d+$", told.strip().splitlines()[-1]), told[-500:]

    second = typed_in("Learning from rewards")
    assert "-r requirements/" in second and "isotrain train tiny-grpo" in second
    run_as_a_new_user(f". .venv/bin/activate\n{second}", clone, 1800)
    steps = (clone / "runs/tiny-grpo/metrics.jsonl").read_text().splitlines()
    rewards = [found for line in steps if (found := json.loads(line).get("critic/rewards/mean")) is not None]
    assert rewards[-1] > rewards[0] + 0.3
