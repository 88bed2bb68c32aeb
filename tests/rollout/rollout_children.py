"""Engines in processes of their own, because this one has a simulated device that they must not see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import isotrain

CONTRACT = Path(__file__).with_name("contract")


def run_child(
    child: Path,
    work: Path,
    *arguments: str,
    timeout: float,
    python: str = sys.executable,
    path: Sequence[Path] = (),
) -> dict[str, Any]:
    """Everything that one engine can show; starting it is what takes the time."""
    # An interpreter of another environment has what isotrain needs, but not isotrain.
    source = {"PYTHONPATH": os.pathsep.join(map(str, [Path(isotrain.__file__).parents[1], *path]))}
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("NPU_SIM")}
    done = subprocess.run(
        [python, str(child), str(work), *arguments],
        env={**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **source},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
