"""Commands about files that are missing, damaged, or made to hurt: one message, in time, no traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from click.testing import CliRunner

from isotrain.cli.main import app
from isotrain.observe.run_directory import RunDirectory


def write(data: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(data)

    return make


DIGITS = b"9" * 400
KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "directory": Path.mkdir,
    "empty": Path.touch,
    "binary": write(bytes(range(256)) * 20),
    "zeros": write(b"\0" * 5000),
    "torn": write(b'{"step": 1, "a"'),
    "deep list": write(b"[" * 200_000),
    "deep object": write(b'{"a":' * 500 + b"1" + b"}" * 500),
    "not finite": write(
        b'{"step": NaN, "steps": Infinity, "time": -Infinity, "state": "running", "x": NaN}\n'
    ),
    "large": write(b'{"step": %b, "steps": %b, "x": %b, "time": %b}\n' % ((DIGITS,) * 4)),
    "too many digits": write(b'{"step": ' + b"9" * 5000 + b"}\n"),
    "other types": write(
        b'{"name": [1], "algorithm": "x", "model": 3, "rollout": [], "trainer": "x", "starts": 3, '
        b'"state": {}, "step": "x", "steps": [], "time": "x", "error": [], "waiting": 3}\n'
    ),
    "steps twice": write(b'{"step": 1, "a": 1}\n{"step": 1, "a": 2}\n{"step": 0, "a": 2}\n{"step": -5}\n'),
    "half a pair": write(b'{"step": 1, "\\ud800": 1, "name": "\\ud800", "state": "\\ud800"}\n'),
}
FILES = (
    *("resolved.json", "environment.json", "metrics.jsonl", "log.txt", "status.json", ".lock"),
    "trajectories/step-000001-rank-00000.parquet",
)


# What waits for a pipe or reads a device to its end fails, and does not stop the suite.
pytestmark = pytest.mark.timeout(50)


COMMAND = typer.main.get_command(app)  # once: making it takes longer than most commands


def ends_with_a_message(*arguments: str | Path, codes: tuple[int, ...] = (0, 1, 2)) -> str:
    done = CliRunner().invoke(COMMAND, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), (arguments, done.exc_info)
    assert done.exit_code in codes, (arguments, done.output)
    assert "Traceback" not in done.output
    if done.exit_code:
        assert done.output.strip(), arguments
    return done.output


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_others(tmp_path: Path, kind: str) -> None:
    """One run for each file that is of this kind."""
    damaged = {file: RunDirectory(tmp_path / "runs" / str(number)) for number, file in enumerate(FILES)}
    for file, run in damaged.items():
        RunDirectory.create(run.path, "", {"name": "a", "algorithm": {"name": "sft"}}, {})
        run.metrics.write_text('{"step": 1, "train/loss": 1.0}\n')
        run.log.write_text("said\n")
        run.status.write_text('{"state": "finished", "step": 1, "steps": 1}\n')
        path = run.path / file
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        KINDS[kind](path)
    listed = ends_with_a_message("runs", tmp_path / "runs", "--json", codes=(0,)).splitlines()
    expected = {str(run.path) for run in damaged.values() if run.resolved.is_file()}
    assert {json.loads(line)["path"] for line in listed} == expected and len(expected) >= len(FILES) - 1
    ends_with_a_message("runs", tmp_path / "runs", codes=(0,))
    for run in damaged.values():
        ends_with_a_message("logs", run.path, codes=(0,) if run.log.is_file() else (1,))
        shown = run.metrics.is_file() or run.resolved.is_file()
        page = tmp_path / "page.html"
        ends_with_a_message("view", run.path, "--export", page, codes=(0,) if shown else (1,))


PLACES = ("missing", "file", "file/below", "garbage", "dir", "deep.json", "zero", "loop", "/proc/1/none")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ("logs", "@"),
            ("runs", "@"),
            ("view", "@", "--export", "page.html"),
            ("view", "run", "--export", "@"),
        ),
        *(("train", "@", "--dry-run"), ("recipes", "tiny-sft", "--out", "@"), ("import", "verl", "@")),
        *(("parity", "@", "run"), ("parity", "verify", "@"), ("parity", "run", "run", "--report", "@")),
        *(("parity", "sign", "@", "--key", "@"), ("doctor", "@"), ("export-config", "@", "--to", "verl")),
    ],
)
def test_places_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create("run", "", {"name": "a"}, {})
    rows = [json.dumps({"step": step, "train/loss": 1 / step}) for step in range(1, 30)]
    run.metrics.write_text("\n".join(rows) + "\n")
    Path("file").write_text("x")
    Path("garbage").write_bytes(bytes(range(256)) * 20)
    Path("dir").mkdir()
    Path("deep.json").write_text("[" * 200_000)
    Path("zero").symlink_to("/dev/zero")
    Path("loop").symlink_to("loop")
    ends_with_a_message(*(place if argument == "@" else argument for argument in arguments))
