"""`isotrain view` as a user starts it."""

from __future__ import annotations

import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import npusim
import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.observe.metrics import MetricsLog
from support import command


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append(1, {"train/loss": 2.0})
    return tmp_path


@pytest.mark.heavy
def test_it_prints_its_address_and_ends_with_ctrl_c(run: Path) -> None:
    process = subprocess.Popen(
        command("view", str(run), "--no-open"),
        env=npusim.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address), address
        with urllib.request.urlopen(address, timeout=30) as reply:
            assert b"<title>isotrain view</title>" in reply.read()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and rest.endswith("ended\n") and "Traceback" not in rest


@pytest.mark.heavy
def test_the_key_is_not_among_the_arguments_of_the_browser(run: Path, tmp_path: Path) -> None:
    """Every user of a machine can list the arguments of all processes."""
    browser, told = tmp_path / "browser", tmp_path / "told"
    browser.write_text(
        '#!/bin/sh\nfile=$(printf %s "$1" | sed s,^file://,,)\n'
        f'{{ echo "$1"; stat -c %a "$file" "$(dirname "$file")"; cat "$file"; echo end; }} > {told}.part\n'
        f"mv {told}.part {told}\n"
    )
    browser.chmod(0o755)
    process = subprocess.Popen(
        command("view", str(run)),
        env={**npusim.environment(), "DISPLAY": ":0", "BROWSER": f"{browser} %s"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        for _ in range(600):
            if told.exists():
                break
            time.sleep(0.1)
        argument, file_mode, directory_mode, *page = told.read_text().splitlines()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    key = address.rstrip("/").rpartition("/")[2]
    assert argument.startswith("file:///") and key not in argument
    assert (file_mode, directory_mode) == ("600", "700") and f"url={address}" in "\n".join(page)
    assert not Path(argument.removeprefix("file://")).exists(), "it ends with the server"


def test_export_writes_one_page(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["view", str(run), str(run), "--export", str(out)])
    assert done.exit_code == 0 and "with 0 of 0 recorded trajectories" in done.output
    assert b"train/loss" in out.read_bytes()


def test_refuses_a_directory_that_is_no_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["view", str(tmp_path / "nothing")])
    assert done.exit_code == 1 and "is not a run directory" in done.output
