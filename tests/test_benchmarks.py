"""What all benchmarks have: `--quick`, and a line of results after each turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = [path for path in BENCHMARKS.glob("*.py") if "def main()" in path.read_text()]

SCRIPT = """
import bench
from turns import Turns, take_turns

def tell(responses):
    turns = len(responses["a"])
    assert turns == len(responses["b"])
    bench.report("script", turns, goal=1.0, met=True, rows=[turn["rows"][0]["x"] for turn in responses["b"]])

parser = bench.Options(__doc__, turns=2)
parser.add_argument("--turns", type=int, default=3)
parser.add_argument("--side")
options = parser.read()
if options.side:
    turns = Turns(1)
    for x in range(options.turns + 2):
        turns.after_step(x=x)
else:
    take_turns(["a", "b"], options.turns, tell)
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_options_come_from_the_helper(script: Path) -> None:
    text = script.read_text()
    assert "Options(__doc__" in text and "parser.read()" in text and "ArgumentParser" not in text


@pytest.mark.parametrize(
    ("arguments", "turns"), [((), 3), (("--quick",), 2), (("--quick", "--turns", "1"), 1)]
)
def test_a_line_after_each_turn(tmp_path: Path, arguments: tuple[str, ...], turns: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["ratio"] for line in lines] == list(range(1, turns + 1)), done.stderr
    # The first turn warms up.
    assert lines[-1]["rows"] == list(range(1, turns + 1))
    assert all(line.get("quick", False) == ("--quick" in arguments) for line in lines)


def test_sides_that_need_the_same_model_build_it_once(tmp_path: Path) -> None:
    """All sides of a benchmark start at the same time; on a new machine none finds the model in the cache."""
    program = """
import sys, time
from pathlib import Path
from smollm2 import built_once

def build(directory):
    (directory / "config.json").write_text("{}")
    time.sleep(0.5)  # a side that takes the directory now has a model without weights
    (directory / "weights").write_text(sys.argv[2])
    print("built", flush=True)

target = built_once(Path(sys.argv[1]), build)
assert (target / "weights").read_text() in "abc"
"""
    target = tmp_path / "models" / "model"
    left_behind = tmp_path / "models" / ".model.partial"  # of a side that was killed
    left_behind.mkdir(parents=True)
    (left_behind / "damaged").touch()
    sides = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(target), side],
            env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for side in "abc"
    ]
    printed = [side.communicate(timeout=60)[0] for side in sides]
    assert [side.returncode for side in sides] == [0, 0, 0]
    assert sorted(printed) == ["", "", "built\n"]
    assert {path.name for path in target.iterdir()} == {"config.json", "weights"}
    assert not left_behind.exists()
