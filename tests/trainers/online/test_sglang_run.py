"""A whole run over SGLang's interface, where a recording server with a real model stands in for SGLang."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pytest
from online_runs import OnlineRun, online_recipe

import isotrain
from isotrain.observe.metrics import read_metrics

pytestmark = pytest.mark.ray

RECORDER = Path(__file__).parents[2] / "rollout" / "sglang_recorder"


@pytest.mark.slow
def test_weights_and_responses_go_through_the_server(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(isotrain.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(RECORDER), str(source)]))
    monkeypatch.setenv("SGLANG_RECORDER", str(tmp_path))
    monkeypatch.setenv("SGLANG_RECORDER_MODEL", "1")
    (tmp_path / "fault.json").write_text("{}")
    rollout = {"engine": "sglang", "n": 4, "max_tokens": 6, "server_python": sys.executable}
    run = OnlineRun(online_recipe(tiny, tmp_path / "run", "npu", rollout=rollout), tmp_path)
    rows = read_metrics(run.finish() / "metrics.jsonl")
    assert "unverified: it has not run against a real SGLang server or device" in run.text
    assert len(rows) == 4
    for row in rows:
        # The server has the weights that were trained, and answers with them.
        assert row["rollout/weight_check_diff"] < 1e-5
        assert row["training/rollout_probs_diff_max"] < 1e-5
        assert row["actor/grad_norm"] > 0
    entries = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    (began,) = (entry for entry in entries if "options" in entry)
    assert not psutil.pid_exists(began["pid"])
    paths = [entry["path"] for entry in entries if "path" in entry]
    assert paths.count("/generate") >= 4 * 16
    assert paths.count("/update_weights_from_disk") >= 4
    assert paths.count("/release_memory_occupation") >= 3 <= paths.count("/resume_memory_occupation")
