"""README's five-minute start, typed literally in a clean clone."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_five_minute_start(tmp_path: Path) -> None:
    section = (REPOSITORY / "README.md").read_text().split("## Five minutes, offline")[1].split("\n## ")[0]
    typed = "\n".join(re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL))
    assert "isotrain train" in typed
    clone = tmp_path / "isotrain"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True, timeout=60)
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
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # The form of an answer is learned in a minute; the sums themselves are not.
    assert re.search(r"^\d+ \S \d+ = \d+$", done.stdout.strip().splitlines()[-1]), done.stdout[-500:]
