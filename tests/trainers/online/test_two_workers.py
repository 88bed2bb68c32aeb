"""An engine that vLLM splits over two processes, inside a placement group as in every run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import needs_vllm

CHILD = Path(__file__).with_name("two_workers_child.py")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1100),
    needs_vllm,
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("NPU_SIM")}
    paths = [str(CHILD.parent), str(CHILD.parents[2]), str(CHILD.parents[2] / "device")]
    done = subprocess.run(
        [sys.executable, str(CHILD), str(tmp_path_factory.mktemp("work"))],
        env={**clean, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_weights_and_log_probs(found: dict[str, Any]) -> None:
    weights = found["weights"]
    assert weights["moved"] > 0.2
    assert max(weights["weight_check"], weights["responses"]) <= 1e-4


@pytest.mark.parametrize(("when", "deaths"), [("idle", 1), ("generating", 2)])
def test_an_engine_that_loses_a_worker_is_replaced(found: dict[str, Any], when: str, deaths: int) -> None:
    after = found[when]
    assert after["deaths"] == [deaths]
    assert max(after["weight_check"], after["responses"]) <= 1e-4
    assert "a worker process of vLLM has ended" in found["said"][deaths - 1]
