"""A machine kept in a folder gives the same report elsewhere, without secrets, and cannot climb out of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isotrain.doctor.examine import examine
from isotrain.doctor.recorded import RecordedMachine, Recording
from isotrain.doctor.system import ThisMachine
from isotrain.errors import DataError

MACHINES = Path(__file__).parent / "machines"


@pytest.mark.parametrize(
    "machine", ["good-a3", "unhealthy-and-in-use", "plugin-without-cann", "hccl-settings"]
)
def test_a_copy_is_found_to_be_the_same(machine: str, tmp_path: Path) -> None:
    original = examine(Recording(RecordedMachine(MACHINES / machine), tmp_path))
    assert examine(RecordedMachine(tmp_path)) == original


def test_this_machine_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    machine = RecordedMachine(folder)
    assert machine.read("/../../secret") is None and machine.read("/link") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"machine": 1, "python": "3"}',
        '{"machine": "a", "python": "3", "packages": {"torch": 2}}',
    ],
)
def test_damaged_folders(tmp_path: Path, text: str) -> None:
    (tmp_path / "machine.json").write_text(text)
    with pytest.raises(DataError, match="machine"):
        RecordedMachine(tmp_path)
