from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from run_samples import isotrain_run

from isotrain.errors import DataError
from isotrain.observe.metrics import MetricsLog
from isotrain.observe.run_directory import RunDirectory
from isotrain.tools.parity.devices import backend
from isotrain.tools.parity.read.runs import INSTRUCTIONS, read_run


def test_a_run_with_its_recipe_environment_and_digests(tmp_path: Path) -> None:
    run = read_run(isotrain_run(tmp_path / "run"))
    assert run.format == "isotrain run"
    assert set(run.metrics) == {"loss", "lr", "tokens"}
    assert run.metrics["loss"].steps_S.tolist() == [1, 2, 3, 4, 5]
    assert run.metrics["loss"].values_S.tolist() == [1 / step for step in range(1, 6)]
    assert run.recipe == {"task": "sft", "seed": 1}
    assert run.environment == {"device": {"type": "cpu"}}
    assert run.data == {"train": "ab12"}
    for name in ("metrics.jsonl", "resolved.json", "environment.json"):
        assert run.sha256[name] == hashlib.sha256((tmp_path / "run" / name).read_bytes()).hexdigest()
    assert len(run.sha256) == 3


def test_the_last_start_counts_and_a_resumed_log_is_exact(tmp_path: Path) -> None:
    path = isotrain_run(tmp_path / "run")
    again = {"device": {"type": "cpu"}, "python": "3.12", "data": {"train": "cd34"}}
    RunDirectory.create(path, "", {"seed": 1}, again)
    with MetricsLog.resume(path / "metrics.jsonl", 3) as log:
        log.append(4, {"loss": math.nan, "grad_norm": math.inf})
    run = read_run(path)
    assert run.data == {"train": "cd34"} and run.environment == {"device": {"type": "cpu"}, "python": "3.12"}
    assert run.metrics["loss"].steps_S.tolist() == [1, 2, 3, 4]
    assert math.isnan(run.metrics["loss"].values_S[-1])
    assert run.metrics["grad_norm"].values_S.tolist() == [math.inf]


START: dict[str, Any] = {
    "time": "2026-11-01T00:00:00+00:00",
    "cpu": {"model": "Xeon", "features": ["avx2"]},
    "device": {"type": "cpu", "name": "Xeon", "ranks": 1, "determinism": {"level": "off"}},
    "variables": {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"},
}


def resumed(path: Path, *starts: dict[str, Any]) -> Path:
    isotrain_run(path)
    (path / "environment.json").write_text(json.dumps({"starts": list(starts)}))
    return path


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("device", {"type": "npu"}, "type: cpu -> npu"),
        ("device", {"name": "EPYC"}, "name: Xeon -> EPYC"),
        ("device", {"ranks": 2}, "ranks: 1 -> 2"),
        ("device", {"determinism": {"level": "on"}}, "determinism.level: off -> on"),
        ("cpu", {"features": ["avx2", "avx512f"]}, "features"),
        ("variables", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "ONEDNN_MAX_CPU_ISA: AVX2 -> AVX512"),
    ],
)
def test_a_run_that_went_on_on_another_device_is_of_neither(
    tmp_path: Path, section: str, change: dict[str, Any], message: str
) -> None:
    """Also where it came back: what was computed in between is in the curves."""
    other = {**START, section: {**START[section], **change}}
    for starts in ([START, other], [START, START, other, START]):
        path = resumed(tmp_path / f"{len(starts)}", *starts)
        with pytest.raises(DataError, match=r"environment\.json.*another device.*train again") as error:
            read_run(path)
        assert message in str(error.value)


def test_what_may_change_when_a_run_goes_on(tmp_path: Path) -> None:
    """Threads, and of an accelerator's host the processor, do not make it another device."""
    threads = {**START, "variables": {**START["variables"], "OMP_NUM_THREADS": "8"}, "time": "later"}
    assert read_run(resumed(tmp_path / "threads", START, threads)).environment == threads
    on_device = {**START, "device": {**START["device"], "type": "npu", "name": "Ascend910B3"}}
    other_host = {**on_device, "cpu": {"model": "EPYC", "features": []}, "variables": {}}
    assert read_run(resumed(tmp_path / "host", on_device, other_host)).environment == other_host


def test_all_instruction_sets_that_can_be_certified_are_told_apart() -> None:
    labels = ("cpu", "cpu-amx", "cpu-avx512", "cpu-avx2")
    assert {name for label in labels for name in backend(label).variables} <= set(INSTRUCTIONS)


def test_reads_curves_alone_and_skips_a_torn_last_line(tmp_path: Path) -> None:
    path = isotrain_run(tmp_path / "run")
    (path / "resolved.json").unlink()
    (path / "environment.json").unlink()
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    run = read_run(path)
    assert run.recipe is None and run.environment is None and run.data == {}
    assert len(run.metrics["loss"]) == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 5, "loss": 7.0}', "line 6: step 5 of loss is 7.0 here and 0.2 before"),
        ('{"step": 2, "new": 1.0}\n{"step": 1, "new": 1.0}', "line 7: step 1 of new comes after step 2"),
        ('{"step": 6.5, "loss": 7.0}', "line 6: `step` is not a whole number: '6.5'"),
        ('{"loss": 7.0}', "line 6: `step` is not a whole number"),
        ('{"step": 6, "loss": "high"}', "line 6: 'loss' is not a number: 'high'"),
        ('{"step": 6', "line 6: not JSON"),
        ("[" * 100_000, "line 6: not JSON"),
        ("[]", "line 6: not a JSON object"),
        ('{"step": 6, "\\u001b[31mred": 1}', "is not the name of a metric"),
    ],
)
def test_refuses_damaged_lines(tmp_path: Path, line: str, message: str) -> None:
    path = isotrain_run(tmp_path / "run")
    with open(path / "metrics.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl") as error:
        read_run(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("resolved.json", "{", "resolved.json: not JSON"),
        ("resolved.json", "[1]", "resolved.json: not a JSON object"),
        ("environment.json", "{}", 'no list "starts"'),
        ("environment.json", '{"starts": [1]}', 'no list "starts"'),
        ("environment.json", '{"starts": [{"data": {"train": 1}}]}', "are not digests"),
        ("metrics.jsonl", "", "has the run taken a step"),
    ],
)
def test_refuses_damaged_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = isotrain_run(tmp_path / "run")
    (path / name).write_text(content)
    with pytest.raises(DataError) as error:
        read_run(path)
    assert message in str(error.value)


def test_no_start_is_no_environment(tmp_path: Path) -> None:
    path = isotrain_run(tmp_path / "run")
    (path / "environment.json").write_text(json.dumps({"starts": []}))
    assert read_run(path).environment is None


@pytest.mark.parametrize("name", ["metrics.jsonl", "resolved.json"])
def test_links_do_not_lead_out(tmp_path: Path, name: str) -> None:
    path = isotrain_run(tmp_path / "run")
    secret = tmp_path / "secret"
    (path / name).rename(secret)
    (path / name).symlink_to(secret)
    with pytest.raises(DataError, match="leads out"):
        read_run(path)
