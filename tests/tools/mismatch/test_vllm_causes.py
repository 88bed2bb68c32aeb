"""The same experiments with vLLM: hooks in its runner, its cache, its packed weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "mismatch_causes.py"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_vllm_causes_are_named() -> None:
    pytest.importorskip("vllm")
    cases = (
        "stale tensor",
        "other batch composition",
        "decode kernel",
        "wrong rope in one layer",
        "fp8 cache",
    )
    command = [sys.executable, str(BENCHMARK), "--engine", "vllm", "--honest", "1", "--cases", *cases]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line["case"] for line in lines[:-1] if not line["right"]] == []
    assert lines[-1]["named"] == len(cases) and lines[-1]["false_accusations"] == 0
