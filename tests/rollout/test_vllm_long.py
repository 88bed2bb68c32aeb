"""Long prompts in a real vLLM: beyond a model's own limit with YaRN, and read in parts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import isotrain

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

CHILD = Path(__file__).with_name("vllm_long_child.py")


@pytest.mark.parametrize(("how", "batched"), [("at_once", 256), ("in_parts", 48)])
def test_log_probs_of_long_prompts(tmp_path: Path, how: str, batched: int) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NPU_SIM")}
    source = {"PYTHONPATH": str(Path(isotrain.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path), how],
        env={**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **source},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["batched"] == batched
    assert found["difference"] < 1e-4
    # 581 tokens: 48 in each step make 13 or more.
    assert found["steps"] >= 13 if how == "in_parts" else found["steps"] <= 6
