"""A machine kept in a folder gives the same report elsewhere, without secrets, and cannot climb out of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.errors import DataError
from isotrain.tools.doctor.examine import examine
from isotrain.tools.doctor.system import RecordedMachine, Recording, ThisMachine

MACHINES = Path(__file__).parent / "machines"


@pytest.mark.parametrize(
    "machine", ["good-a3", "unhealthy-and-in-use", "plugin-without-cann", "hccl-settings"]
)
def test_a_recording_of_a_recording_has_the_same_report(machine: str, tmp_path: Path) -> None:
    original = examine(Recording(RecordedMachine(MACHINES / machine), tmp_path))
    assert examine(RecordedMachine(tmp_path)) == original


@pytest.mark.heavy
def test_records_this_machine_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("AWS_REGION", "not ours")
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "600")
    report = examine(Recording(ThisMachine(), tmp_path), "cpu")
    kept = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "hf_secret" not in kept and "not ours" not in kept and '"HCCL_CONNECT_TIMEOUT": "600"' in kept
    assert examine(RecordedMachine(tmp_path), "cpu") == report


def test_a_folder_cannot_reach_outside(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("Version=1")
    folder = tmp_path / "machine"
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "link").symlink_to(tmp_path / "secret")
    (folder / "machine.json").write_text(json.dumps({"machine": "x86_64", "python": "3.11.0"}))
    (folder / "commands").mkdir()
    (folder / "commands" / "npu-smi_info.txt").symlink_to(tmp_path / "secret")
    machine = RecordedMachine(folder)
    assert machine.read("/../../secret") is None and machine.read("/link") is None
    assert machine.run(["npu-smi", "info"], 1) is None and machine.read("/a\0b") is None
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "machine.json").write_text((folder / "machine.json").read_text())
    (elsewhere / "files").symlink_to("/")
    assert RecordedMachine(elsewhere).read("/etc/hostname") is None


def test_what_a_folder_says_does_not_steer_the_terminal(tmp_path: Path) -> None:
    described = {"machine": "\x1b[2Jx86_64", "python": "3.11.0", "packages": {"isotrain": "0.1"}}
    (tmp_path / "machine.json").write_text(json.dumps(described))
    shown = CliRunner().invoke(app, ["doctor", str(tmp_path), "--for", "cpu"]).output
    assert "x86_64" in shown and "\x1b[2J" not in shown


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("files/proc/net/tcp", "head\n 0: 0100007F:ZZZZ 0:0 0A x\n 1: \u00b2:\u00b2 0 0A\n"),
        ("commands/npu-smi_info.txt", "exit \u00b2\n| \u00b2 a | OK | x |\n| 0 | 0 | 1 / 2 |\n"),
        ("commands/npu-smi_info.txt", "exit --1\n" + "|" * 10_000),
        ("files/usr/local/Ascend/driver/version.info", "Version=[N/A]\n"),
        ("files/usr/local/Ascend/driver/version.info", "Version=" + "9" * 5000 + "\n"),
    ],
)
def test_odd_texts_end_in_a_report(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (tmp_path / "machine.json").write_text('{"machine": "aarch64", "python": "3.11.0"}')
    assert examine(RecordedMachine(tmp_path), "npu").errors


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"machine": "a", "python": "3", "free": []}',
        '{"machine": "a", "python": "3", "found": 1}',
        '{"machine": "a", "python": "3", "packages": {"torch": "x y"}}',
        '{"machine": 1, "python": "3"}',
        '{"machine": "a", "python": "3", "packages": {"torch": 2}}',
    ],
)
def test_refuses_damaged_folders(tmp_path: Path, text: str) -> None:
    (tmp_path / "machine.json").write_text(text)
    with pytest.raises(DataError, match="machine"):
        RecordedMachine(tmp_path)
