"""The self-test: short runs on a device, compared with the same runs on the host."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isotrain.doctor.matrix import Target
from isotrain.errors import DataError

_STEPS = 20
_TIMEOUT = 900.0


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    result: str
    seconds: float


@dataclass(frozen=True)
class _Pair:
    """Two runs whose losses should agree."""

    name: str
    one: tuple[str, ...]
    other: tuple[str, ...]
    allowed: float
    """Largest relative difference of a loss."""


def self_test(target: Target, work: Path, devices: int | None) -> Iterator[Check]:
    """Each check as it ends; all runs stay in `work`. None is an unknown number."""
    work.mkdir(parents=True, exist_ok=True)
    if any(work.iterdir()):
        # A finished run is not run again: the results would be old ones.
        raise DataError(f"{work} is not empty; give --self-test a new directory")
    start, problem = time.monotonic(), ""
    try:
        _run(work, "prepare", "tiny", "--out", str(work / "tiny"))
    except RuntimeError as error:
        problem = str(error)
    yield Check("a small model and its data", not problem, problem or "made", time.monotonic() - start)
    if problem:
        return
    for number, pair in enumerate(_pairs(target, devices), start=1):
        yield _compare(pair, work, number)


def _pairs(target: Target, devices: int | None) -> Iterator[_Pair]:
    host, device, bfloat16 = "device.type=cpu", f"device.type={target}", "model.dtype=bfloat16"
    # In float32 devices differ by rounding alone; in bfloat16 by what 20 steps make of it.
    if target != "cpu":
        yield _Pair("float32, compared with the host", (host,), (device,), 1e-3)
        yield _Pair("bfloat16, compared with the host", (host, bfloat16), (device, bfloat16), 3e-2)
    repeatable = (device, "device.determinism=on")
    yield _Pair("two runs, bitwise identical", repeatable, repeatable, 0.0)
    if target == "npu":
        yield _Pair("fused operators, compared with none", (device,), (device, "model.fused=on"), 1e-3)
    if devices is None or devices > 1:
        yield _Pair("two ranks, compared with one", (device,), (device, "device.ranks=2"), 1e-3)


def _compare(pair: _Pair, work: Path, number: int) -> Check:
    start = time.monotonic()
    try:
        one = _losses(work, f"{number}-a", pair.one)
        other = _losses(work, f"{number}-b", pair.other)
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        return Check(pair.name, False, str(error), time.monotonic() - start)
    whole = len(one) == len(other) == _STEPS and all(map(math.isfinite, [*one, *other]))
    if not whole:
        said = f"{len(one)} and {len(other)} losses for {_STEPS} steps, or some are not finite"
        return Check(pair.name, False, said, time.monotonic() - start)
    apart = max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))
    result = f"losses of {len(one)} steps differ by at most {apart:.1e} (allowed: {pair.allowed:g})"
    return Check(pair.name, apart <= pair.allowed, result, time.monotonic() - start)


def _losses(work: Path, name: str, changes: tuple[str, ...]) -> list[float]:
    settings = (
        f"model.path={work / 'tiny' / 'model'}",
        f"data.train={work / 'tiny' / 'train.jsonl'}",
        "data.validation=null",
        "model.dtype=float32",
        f"trainer.steps={_STEPS}",
        f"output={work / name}",
    )
    _run(work, "train", "tiny-sft", *settings, *changes)
    rows = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
    return [float(row["train/loss"]) for row in rows if "train/loss" in row]


def _run(work: Path, *arguments: str) -> None:
    """One command of isotrain in a process of its own: it may crash or hang."""
    log = work / "log.txt"
    with log.open("ab") as file:
        file.write(f"\n$ isotrain {' '.join(arguments)}\n".encode())
        file.flush()
        start = file.tell()
        command = [sys.executable, "-m", "isotrain", *arguments]
        try:
            done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"timeout after {_TIMEOUT:.0f} s; see {log}") from None
    if done.returncode:
        said = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"{said[-1] if said else 'it ended without a message'} (see {log})")
