"""Every stage has a verdict when time is over, and none that ran out of time counts as passed."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.tools.doctor.self_test import folder as folders
from isotrain.tools.doctor.self_test.run import SelfTest, marked
from isotrain.tools.doctor.self_test.stages import DEVICES, LAST_SECONDS, PARTS, STAGES
from isotrain.tools.doctor.self_test.verdicts import SelfTestSetting, StageVerdict
from support import command

GOOD_MACHINE = Path(__file__).parents[1] / "machines" / "good-a2"


def verdicts(work: Path, seconds: float, **changes: float) -> dict[str, StageVerdict]:
    parts = [replace(DEVICES, **changes), *PARTS[1:]]
    self_test = SelfTest(SelfTestSetting(device="cpu", work=str(work)), parts=parts, total_seconds=seconds)
    by_stage = {verdict.stage: verdict for verdict in self_test.run()}
    assert marked(self_test.mark) == []
    assert list(by_stage) == list(STAGES)
    return by_stage


def test_a_stage_that_time_interrupts_is_unfinished_and_so_are_those_after_it(tmp_path: Path) -> None:
    by_stage = verdicts(tmp_path, LAST_SECONDS + 0.5)
    first = by_stage["devices"]
    assert first.outcome == "unfinished" and first.seconds > 0
    assert "minutes of --budget were over: no verdict within" in first.result
    assert by_stage["attention"].outcome == by_stage["sft"].outcome == "unfinished"
    assert by_stage["sft"].result == "devices did not end"
    # What could not have run in any time is still skipped, with its reason.
    assert by_stage["graphs"].outcome == "skipped"
    assert not any(verdict.outcome in ("passed", "failed") for verdict in by_stage.values())


def test_a_stage_that_exceeds_its_own_limit_has_failed(tmp_path: Path) -> None:
    by_stage = verdicts(tmp_path, 600.0, timeout=0.5)
    assert by_stage["devices"].outcome == "failed"
    assert by_stage["sft"].outcome == "skipped" and by_stage["sft"].result == "devices did not pass"


@pytest.mark.heavy
def test_what_is_left_behind_is_looked_for_when_time_is_over(tmp_path: Path) -> None:
    # Time for the first part alone: it makes the model before it answers.
    by_stage = verdicts(tmp_path, LAST_SECONDS + 30.0)
    outcomes = {stage: verdict.outcome for stage, verdict in by_stage.items()}
    assert outcomes["devices"] == outcomes["memory-returned"] == "passed"
    assert outcomes["colocated-save"] == "unfinished"


def folder_of(tmp_path: Path, *verdicts: StageVerdict) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copytree(GOOD_MACHINE, folder / folders.MACHINE)
    folders.write(folder, tmp_path, verdicts, device="npu", engine="hf", simulated=False)
    return folder


PASSED = StageVerdict(stage="devices", outcome="passed", result="8 devices")
UNFINISHED = StageVerdict(stage="sft", outcome="unfinished", result="devices did not end")
FAILED = StageVerdict(stage="attention", outcome="failed", result="error is 1")


@pytest.mark.parametrize(
    ("content", "code"),
    [((PASSED,), 0), ((PASSED, UNFINISHED), 3), ((PASSED, UNFINISHED, FAILED), 1)],
)
def test_the_exit_code_tells_unfinished_from_passed(
    tmp_path: Path, content: tuple[StageVerdict, ...], code: int
) -> None:
    result = CliRunner().invoke(app, ["doctor", str(folder_of(tmp_path, *content)), "--for", "npu"])
    assert result.exit_code == code, result.output
    assert ("1 unfinished" in result.output) == (UNFINISHED in content)


@pytest.mark.slow
def test_a_small_budget_ends_in_time_with_a_verdict_on_every_stage(tmp_path: Path) -> None:
    done = subprocess.run(
        command("doctor", "--for", "cpu", "--self-test", str(tmp_path / "trial"), "--budget", "3"),
        capture_output=True,
        text=True,
        timeout=330,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    written = json.loads((tmp_path / "trial" / folders.RESULTS).read_text())["verdicts"]
    assert [verdict["stage"] for verdict in written] == list(STAGES)
    assert {"passed", "unfinished"} <= {verdict["outcome"] for verdict in written}
