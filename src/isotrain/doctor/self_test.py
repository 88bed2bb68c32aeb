"""Short runs on a device beside the same on the host: what an owner of hardware can check in one command."""

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
    figure: str
    seconds: float


@dataclass(frozen=True)
class _Pair:
    """Two runs whose losses should be alike."""

    name: str
    one: tuple[str, ...]
    other: tuple[str, ...]
    allowed: float
    """Largest relative difference of a loss."""


def self_test(target: Target, work: Path, devices: int | None) -> Iterator[Check]:
    """Each check as it is done; everything that was run stays in `work`. None is an unknown number."""
    work.mkdir(parents=True, exist_ok=True)
    if any(work.iterdir()):
        # A finished run is not run again: what is reported would be what was there.
        raise DataError(f"{work}: is not empty; give --self-test a new directory")
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
        yield _Pair("float32, beside the host", (host,), (device,), 1e-3)
        yield _Pair("bfloat16, beside the host", (host, bfloat16), (device, bfloat16), 3e-2)
    repeatable = (device, "device.determinism=on")
    yield _Pair("twice the same, bit for bit", repeatable, repeatable, 0.0)
    if target == "npu":
        yield _Pair("fused operators, beside none", (device,), (device, "model.fused=on"), 1e-3)
    if devices is None or devices > 1:
        yield _Pair("two ranks, beside one", (device,), (device, "device.ranks=2"), 1e-3)


def _compare(pair: _Pair, work: Path, number: int) -> Check:
    start = time.monotonic()
    try:
        one = _losses(work, f"{number}-a", pair.one)
        other = _losses(work, f"{number}-b", pair.other)
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        return Check(pair.name, False, str(error), time.monotonic() - start)
    whole = len(one) == len(other) == _STEPS and all(map(math.isfinite, [*one, *other]))
    if not whole:
        said = f"{len(one)} and {len(other)} losses of {_STEPS} steps, or some that are not numbers"
        return Check(pair.name, False, said, time.monotonic() - start)
    apart = max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))
    figure = f"losses of {len(one)} steps at most {apart:.1e} apart (allowed: {pair.allowed:g})"
    return Check(pair.name, apart <= pair.allowed, figure, time.monotonic() - start)


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
            raise RuntimeError(f"no end within {_TIMEOUT:.0f} s; see {log}") from None
    if done.returncode:
        said = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"{said[-1] if said else 'it ended without a word'} (see {log})")
