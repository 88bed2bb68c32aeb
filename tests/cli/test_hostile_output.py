"""Texts of strangers, through every command that shows them: nothing of them steers the terminal."""

from __future__ import annotations

import csv
import json
import os
import pty
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from certified_runs import rewrite, written
from isotrain.api.child import _relay
from isotrain.cli.main import app
from isotrain.terminal import visible
from test_terminal import HOSTILE, ORDINARY

# Concealed and unusual colours, which no style of ours has: they tell a stranger's sequence from our own.
MARK = "\x1b[8mM\x1b[38;5;201m\x1b]0;t\x07\x9b2J\u202e\u2066\r"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
ROUNDS = 4


def hostile(draw: random.Random, *, without: str = "") -> str:
    letters = [letter for letter in HOSTILE + ORDINARY if letter not in without]
    mark = "".join(letter for letter in MARK if letter not in without)
    return "".join(draw.choices(letters, k=draw.randint(0, 12))) + mark + draw.choice(letters)


def argument(draw: random.Random) -> str:
    """What a program can be given: halves of characters only where they stand for bytes, and no zero."""
    return hostile(draw, without="\x00\ud800")


def named(draw: random.Random) -> str:
    """The same for files."""
    return hostile(draw, without="\x00\ud800/")


def whole(draw: random.Random) -> str:
    """Without halves of characters, which the readers of JSON refuse before they show anything."""
    return hostile(draw, without="\ud800\udc9b")


def run(*arguments: str | Path, colour: bool = False) -> Result:
    # On a pipe typer removes what looks like a colour, which would hide that something was there.
    variables = {"COLUMNS": "100", "FORCE_COLOR": "1"} if colour else {"COLUMNS": "100"}
    result = CliRunner().invoke(app, [os.fspath(argument) for argument in arguments], env=variables)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def check(shown: str, colour: bool = False) -> None:
    """Whole or broken over lines, there is no sequence but those of our colours."""
    assert "\x1b[8m" not in shown and "\x1b[38;5;201m" not in shown, repr(shown)
    left = _COLOUR.sub("", shown) if colour else shown
    assert not (found := set(left) & set(HOSTILE)), f"{found!r} in {shown!r}"


def csv_logs(root: Path, draw: random.Random) -> list[str | Path]:
    header = [hostile(draw, without="\x00\n\ud800\udc9b") for _ in range(2)]
    paths = [root / f"{name}-{named(draw)}.csv" for name in "ab"]
    for path in paths:
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["step", "loss", *header])
            rows.writerows([step, 1 / step, step, draw.random()] for step in range(1, 9))
    return ["parity", "compare", *paths, "--metric", header[0], "--metric", "loss"]


def json_logs(root: Path, draw: random.Random) -> list[str | Path]:
    names = [argument(draw) for _ in range(2)]
    return ["parity", "compare", *logs(root, draw, names), "--metric", names[0], "--metric", names[1]]


def logs(root: Path, draw: random.Random, names: list[str]) -> list[Path]:
    paths = [root / f"{name}-{named(draw)}.jsonl" for name in "ab"]
    for path in paths:
        rows = [{"step": step, **{name: step + draw.random() for name in names}} for step in range(1, 9)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def paths_only(root: Path, draw: random.Random) -> list[str | Path]:
    """Ordinary metrics: the readers refuse names with control characters."""
    return ["parity", "compare", *logs(root, draw, ["loss"])]


def missing_metric(root: Path, draw: random.Random) -> list[str | Path]:
    arguments = json_logs(root, draw)
    return [*arguments, "--metric", argument(draw)]


def run_directories(root: Path, draw: random.Random) -> list[str | Path]:
    written(root)
    runs = [root / "runs" / name for name in ("reference", "candidate")]
    for path in runs:
        for file in path.glob("*.json"):
            content = json.loads(file.read_text())
            file.write_text(json.dumps(spoil(content, draw)))
    return ["parity", "compare", *runs]


def spoil(content: Any, draw: random.Random) -> Any:
    """Half of the texts in a JSON value replaced, and a few keys more."""
    if isinstance(content, dict):
        return {key: spoil(value, draw) for key, value in content.items()} | {whole(draw): whole(draw)}
    if isinstance(content, list):
        return [spoil(value, draw) for value in content]
    return whole(draw) if isinstance(content, str) and draw.random() < 0.5 else content


def certificate(root: Path, draw: random.Random) -> list[str | Path]:
    def change(content: dict[str, Any]) -> None:
        content["recipe"]["model"]["path"] = whole(draw)
        content["levels"][0]["words"] = whole(draw)
        for side in ("reference", "candidate"):
            spoiled = spoil(content[side], draw)
            content[side].update({key: spoiled[key] for key in content[side]})
        if draw.random() < 0.5:
            content[whole(draw)] = whole(draw)

    path = rewrite(written(root), change)
    return ["parity", "verify", path.rename(path.with_name(f"{named(draw)}.json"))]


def recipe_values(root: Path, draw: random.Random) -> list[str | Path]:
    path = root / "recipe.yaml"
    content = {
        "name": "a",
        "output": whole(draw),
        "model": {"path": whole(draw)},
        "data": {"train": [whole(draw)]},
        "algorithm": {"name": "sft"},
    }
    if draw.random() < 0.5:
        content[whole(draw)] = whole(draw)
    path.write_text(json.dumps(content))
    return [
        "train",
        path,
        "--dry-run",
        *draw.choice([[], [argument(draw)], [f"optimizer.lr={argument(draw)}"]]),
    ]


def recipe_name(root: Path, draw: random.Random) -> list[str | Path]:
    return [draw.choice(["train", "recipes"]), argument(draw)]


def no_command(root: Path, draw: random.Random) -> list[str | Path]:
    given = argument(draw)
    return draw.choice([[given], ["train", f"--{given}"], ["doctor", "--for", given]])


def export_path(root: Path, draw: random.Random) -> list[str | Path]:
    return ["export", root / named(draw), "--out", root / named(draw)]


def recorded_machine(root: Path, draw: random.Random) -> list[str | Path]:
    packages = {"isotrain": "0.1", whole(draw): "1.0", "torch": "2.13.0"}
    described = {"machine": whole(draw), "python": "3.11.0", "packages": packages}
    (root / "machine.json").write_text(json.dumps(described))
    return ["doctor", root, "--for", "cpu", "--notes"]


def self_test_folder(root: Path, draw: random.Random) -> list[str | Path]:
    verdicts = [
        {"stage": stage, "outcome": outcome, "result": whole(draw), "seconds": 1.0, "metrics": {}}
        for stage, outcome in (("devices", "passed"), ("sft", "failed"), (whole(draw), "failed"))
    ]
    results = {
        "isotrain": whole(draw),
        "date": whole(draw),
        "device": "cpu",
        "engine": "hf",
        "simulated": False,
        "seconds": 3.0,
        "verdicts": verdicts,
    }
    (root / "self-test.json").write_text(json.dumps(results))
    (root / "logs").mkdir()
    (root / "logs" / "sft.txt").write_text(whole(draw), encoding="utf-8")
    (root / "machine").mkdir()
    recorded_machine(root / "machine", draw)
    return ["doctor", root, "--for", "cpu"]


COMMANDS: tuple[Callable[[Path, random.Random], list[str | Path]], ...] = (
    csv_logs,
    json_logs,
    paths_only,
    missing_metric,
    run_directories,
    certificate,
    recipe_values,
    recipe_name,
    no_command,
    export_path,
    recorded_machine,
    self_test_folder,
)


@pytest.mark.parametrize("colour", [False, True], ids=["plain", "colour"])
@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("make", COMMANDS, ids=lambda make: make.__name__)
def test_no_command_lets_it_pass(
    tmp_path: Path, make: Callable[[Path, random.Random], list[str | Path]], seed: int, colour: bool
) -> None:
    result = run(*make(tmp_path, random.Random(f"{make.__name__} {seed}")), colour=colour)
    assert result.output.strip()
    check(result.output, colour)
    assert "\\x1b" in result.output or "\\u" in result.output or not colour, "it is there to be seen"


@pytest.mark.parametrize("make", [paths_only, run_directories], ids=lambda make: make.__name__)
def test_json_stays_json(tmp_path: Path, make: Callable[[Path, random.Random], list[str | Path]]) -> None:
    for seed in range(ROUNDS):
        root = tmp_path / str(seed)
        root.mkdir()
        arguments = make(root, random.Random(seed))
        result = run(*arguments, "--json")
        check(result.output)
        told = json.dumps(json.loads(result.stdout), ensure_ascii=False)
        assert "\u202e" in told, "programs read the names as they are"


def test_dry_run_as_json(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    name = f"a{MARK}"
    sections = {"model": {"path": "m"}, "data": {"train": "d"}, "algorithm": {"name": "sft"}}
    path.write_text(json.dumps({"name": "a", "output": name, **sections}))
    result = run("train", path, "--dry-run")
    check(result.output)
    assert json.loads(result.stdout)["output"] == name


def on_a_terminal(*arguments: str | Path, **variables: str) -> str:
    """What the command writes to a terminal of its own."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "isotrain", *map(os.fspath, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", **variables},
        )
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # Linux's word for the end of a terminal
                break
            if not part:
                break
            said += part
        process.wait(timeout=60)
    finally:
        os.close(ours)
    return said.decode().replace("\r\n", "\n")


@pytest.mark.heavy
@pytest.mark.parametrize("make", [certificate, recipe_values], ids=lambda make: make.__name__)
def test_on_a_terminal(tmp_path: Path, make: Callable[[Path, random.Random], list[str | Path]]) -> None:
    shown = on_a_terminal(*make(tmp_path, random.Random(3)))
    check(shown, colour=True)
    assert _COLOUR.search(shown), "our own colours pass"
    assert r"\x1b" in shown or r"\u" in shown


@pytest.mark.heavy
def test_a_traceback(tmp_path: Path) -> None:
    shown = on_a_terminal("train", f"{tmp_path}/{MARK}", ISOTRAIN_DEBUG="1")
    assert "Traceback" in shown and r"\x1b[8mM" in shown
    check(shown)


def test_what_a_child_says(capsys: pytest.CaptureFixture[str]) -> None:
    code = f"import os; os.write(1, {MARK.encode()!r} + b'\\r1 %\\r2 %\\r\\n')"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    _relay(process)
    shown = capsys.readouterr().out
    check(shown)
    assert shown == visible(MARK[:-1]) + "\n\n1 %\n2 %\n"
