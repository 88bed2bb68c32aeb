"""The folder of a self-test: nothing private in it, and nothing that it holds is trusted."""

from __future__ import annotations

import getpass
import json
import math
import socket
from pathlib import Path

import pytest

from isotrain.errors import DataError
from isotrain.tools.doctor.self_test import folder as folders
from isotrain.tools.doctor.self_test.folder import Redactor, clean_machine, read, read_log, write
from isotrain.tools.doctor.self_test.run import log_of
from isotrain.tools.doctor.self_test.verdicts import StageVerdict
from isotrain.tools.doctor.system import RecordedMachine, Recording, ThisMachine

HOST = "node-17"
SECRETS = (
    "api_key=abcdef123456",
    "WANDB_API_KEY: 'abcdef123456'",
    'HF_TOKEN="hf_abcdef123456"',
    "Authorization: Bearer abcdef123456",
    "https://user:abcdef123456@index.example.org/simple",
    "--api-key abcdef123456",
)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_are_taken_out(tmp_path: Path, secret: str) -> None:
    assert "abcdef123456" not in Redactor(tmp_path)(f"before {secret} after")


def test_names_of_the_machine_are_taken_out(tmp_path: Path) -> None:
    text = f"{tmp_path}/tiny {Path.home()}/models {HOST}: 10.12.7.250:6379 127.0.0.1:80"
    clean = Redactor(tmp_path)(text)
    assert clean == "WORK/tiny ~/models HOST: ADDRESS:6379 127.0.0.1:80"


def test_keeps_what_explains_an_error(tmp_path: Path) -> None:
    text = "max_tokens: 24, loss=0.12345678, torch 2.13.0.1, tokens_per_micro_batch=8192000"
    clean = Redactor(tmp_path)(text)
    assert "loss=0.12345678" in clean and "torch 2.13.0.1" in clean


def written(tmp_path: Path) -> Path:
    work, folder = tmp_path / "work", tmp_path / "folder"
    (folder / folders.MACHINE).mkdir(parents=True)
    (folder / folders.MACHINE / "machine.json").write_text(json.dumps({"home": f"{Path.home()}/x"}))
    log = log_of(work, "engine-start")
    log.parent.mkdir(parents=True)
    log.write_text("\n".join([*(f"line {number}" for number in range(500)), f"at {work}: it failed"]))
    verdicts = [
        StageVerdict(stage="devices", outcome="passed", result=f"of {HOST}", seconds=1.0),
        StageVerdict(
            stage="weight-update", outcome="failed", result="it failed", metrics={"difference": float("nan")}
        ),
        StageVerdict(stage="sleep", outcome="skipped", result="weight-update did not pass"),
    ]
    write(folder, work, verdicts, device="cpu", engine="hf", simulated=False)
    clean_machine(folder)
    return folder


def test_names_in_paths_are_taken_out(tmp_path: Path) -> None:
    """And the doctor still finds the files that `machine.json` speaks of."""
    home = str(Path.home())
    recording = Recording(ThisMachine(), tmp_path / folders.MACHINE)
    file = tmp_path / folders.MACHINE / "files" / f"{home}/toolkit/version.cfg".lstrip("/")
    recording.packages(["pydantic"])
    file.parent.mkdir(parents=True)
    file.write_text(f"in {home}")
    clean_machine(tmp_path)
    assert RecordedMachine(tmp_path / folders.MACHINE).read("~/toolkit/version.cfg") == "in ~"


def test_a_home_that_is_the_root_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    assert Redactor(tmp_path)("a/b at 10.0.0.25. And fe80:0:0:1:2:3:4:5.") == "a/b at ADDRESS. And ADDRESS."


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = written(tmp_path)
    results = read(folder)
    assert results.any("failed") and not results.any("unfinished")
    assert [verdict.outcome for verdict in results.verdicts] == ["passed", "failed", "skipped"]
    assert math.isnan(results.verdicts[1].metrics["difference"])
    assert results.as_json()["verdicts"][1]["metrics"] == {"difference": "nan"}
    assert results.verdicts[0].result == "of HOST"
    # The log of the stage that failed is its part's, and only the end of it.
    log = read_log(folder, "weight-update")
    assert len(log) == folders.LOG_LINES and log[-1] == "at WORK: it failed"
    assert sorted(path.name for path in folder.rglob("*.txt")) == ["weight-update.txt"]
    everything = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert str(tmp_path / "work") not in everything and f"{Path.home()}/" not in everything
    assert f"/{getpass.getuser()}/" not in everything


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"verdicts": [{"stage": 1}]}', "[" * 5000, '{"isotrain": "1' + "0" * 300000]
)
def test_refuses_a_hostile_folder(tmp_path: Path, content: str) -> None:
    (tmp_path / folders.RESULTS).write_text(content)
    with pytest.raises(DataError, match="not the folder of a self-test"):
        read(tmp_path)


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    secret = tmp_path / "secret.txt"
    secret.write_text((folder / folders.RESULTS).read_text())
    (folder / folders.RESULTS).unlink()
    (folder / folders.RESULTS).symlink_to(secret)
    with pytest.raises(DataError, match="link out of the folder"):
        read(folder)
    (folder / folders.LOGS / "sleep.txt").symlink_to(secret)
    assert read_log(folder, "sleep") == []
