"""Files from strangers: whatever is in them, a run or a DataError comes out, in bounded time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_samples import SAMPLES

from isotrain.errors import DataError
from isotrain.tools.parity.read import bounded, columns, tensorboard
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.run import RunLog

pytestmark = pytest.mark.heavy


def file_of(sample: Path) -> Path:
    return sample / "metrics.jsonl" if sample.is_dir() else sample


def mutated(data: bytes, draw: random.Random) -> bytes:
    """One to three cuts, swaps, repeats and changed bytes."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        at, length = draw.randrange(len(changed) + 1), draw.randrange(1, 40)
        kind = draw.randrange(6)
        if kind == 0:
            del changed[at:]
        elif kind == 1:
            del changed[at : at + length]
        elif kind == 2:
            changed[at:at] = changed[at : at + length]
        elif kind == 3:
            changed[at : at + length] = draw.randbytes(length)
        elif kind == 4:
            changed[at : at + 1] = draw.choice(
                [b"\n", b"\r", b'"', b"'", b"{", b"[", b":", b",", b"\x00", b"\xff", b"="]
            )
        elif changed:
            changed[at % len(changed)] ^= 1 << draw.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("name", SAMPLES)
def test_mutated_logs_are_read_or_refused(tmp_path: Path, name: str) -> None:
    sample = SAMPLES[name](tmp_path / name)
    path = file_of(sample)
    data, draw = path.read_bytes(), random.Random(name)
    outcomes = {True: 0, False: 0}
    start = time.monotonic()
    for _ in range(400):
        path.write_bytes(mutated(data, draw))
        try:
            run = read_run(sample)
        except DataError as error:
            assert str(tmp_path) in str(error)
            outcomes[False] += 1
        else:
            assert isinstance(run, RunLog) and run.metrics
            for series in run.metrics.values():
                assert len(series) == len(series.values_S) > 0
                assert (series.steps_S[1:] > series.steps_S[:-1]).all()
            outcomes[True] += 1
    assert min(outcomes.values()) > 10, "mutations that all do the same test nothing"
    assert time.monotonic() - start < 120


@pytest.mark.parametrize("name", SAMPLES)
def test_truncated_logs_are_read_or_refused(tmp_path: Path, name: str) -> None:
    sample = SAMPLES[name](tmp_path / name, steps=3)
    path = file_of(sample)
    data = path.read_bytes()
    for length in range(0, len(data), 1 + len(data) // 300):
        path.write_bytes(data[:length])
        with contextlib.suppress(DataError):
            assert read_run(sample).metrics


def test_refuses_random_bytes(tmp_path: Path) -> None:
    draw = random.Random(1)
    for name in ("a", "a.csv", "a.jsonl", "a.tfevents"):
        for size in (0, 1, 11, 12, 1000, 100_000):
            (tmp_path / name).write_bytes(draw.randbytes(size))
            with pytest.raises(DataError, match=name):
                read_run(tmp_path / name)


def test_what_is_not_there_or_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, message in (
        ("missing", "cannot be read"),
        ("pipe.csv", "not a regular file"),
        ("empty", "neither metrics.jsonl nor event files"),
        ("loop", "cannot be read"),
        ("null\0byte", "cannot be read"),
    ):
        with pytest.raises(DataError, match=message):
            read_run(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,a\n1,1\n")
    (tmp_path / "a.csv").chmod(0)
    with pytest.raises(DataError, match="Permission denied"):
        read_run(tmp_path / "a.csv")


def test_refuses_a_log_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("hello\nstep one\n" * 100)
    with pytest.raises(DataError, match="no metrics in it; give an isotrain run directory"):
        read_run(tmp_path / "log")


def test_refuses_files_beyond_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "large.csv", "wb") as file:
        file.write(b"step,a\n")
        file.truncate(bounded.MAX_BYTES + 1)  # sparse: takes no room
    with pytest.raises(DataError, match=r"large\.csv: larger than 2 GiB"):
        read_run(tmp_path / "large.csv")

    row = {"step": 1, **{f"m{n}": n for n in range(columns.MAX_METRICS + 1)}}
    (tmp_path / "wide.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="line 1: more than 10000 metrics"):
        read_run(tmp_path / "wide.jsonl")

    monkeypatch.setattr(columns, "MAX_VALUES", 4)
    monkeypatch.setattr(tensorboard, "MAX_VALUES", 4)
    for name in ("verl.log", "table.csv", "events.out.tfevents.1.host"):
        with pytest.raises(DataError, match="more than 4 values"):
            read_run(SAMPLES[name](tmp_path / name))


def test_a_console_line_beyond_the_bound_is_passed_over(tmp_path: Path) -> None:
    long = b"x" * (bounded.MAX_LINE + (3 << 20))
    line = b"step:%d - a:1\n"
    (tmp_path / "log").write_bytes(line % 1 + long + b" step:7 - a:1\n" + line % 2 + long + b"\r" + line % 3)
    assert read_run(tmp_path / "log").metrics["a"].steps_S.tolist() == [1, 2, 3]


# Its own peak from /proc: getrusage also counts what the process that forked it held.
READ = r"""
import re, sys, time
from isotrain.tools.parity.read.runs import read_run
start = time.monotonic()
run = read_run(sys.argv[1])
assert len(run.metrics) == 50 and all(len(series) == 100_000 for series in run.metrics.values())
peak = int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())[1])
print(time.monotonic() - start, peak / 2**20)
"""


def test_a_hundred_thousand_steps_of_fifty_metrics(tmp_path: Path) -> None:
    draw = random.Random(2)
    values = [draw.random() for _ in range(1000)]
    with open(tmp_path / "large.jsonl", "w") as file:
        for step in range(100_000):
            at = step % 900
            numbers = ", ".join(f'"train/metric_{n}": {values[at + n]!r}' for n in range(50))
            file.write(f'{{"step": {step}, {numbers}}}\n')
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "large.jsonl")],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, gigabytes = map(float, done.stdout.split())
    print(f"{seconds:.1f} s, {gigabytes:.2f} GiB")
    assert seconds < 60
    assert gigabytes < 1
