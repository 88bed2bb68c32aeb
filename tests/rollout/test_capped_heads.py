"""Engines and the trainer agree on models that scale or cap their logits, and the scores of attention."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import capped_heads_child
import pytest

KINDS = capped_heads_child.KINDS


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["gemma2", "granite"])
def test_the_reference_engine_has_the_trainer_s_log_probs(tmp_path: Path, kind: str) -> None:
    result = capped_heads_child.difference(kind, tmp_path, "hf", "float32", wide=False)
    assert result["difference"] < 1e-5 and result["without"] > 1, result


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", capped_heads_child.KINDS)
def test_vllm_has_the_trainer_s_log_probs(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, capped_heads_child.__file__, str(tmp_path), "vllm", "float32", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result = json.loads(line)
    assert result["difference"] < 1e-4 and result["without"] > 1, result
