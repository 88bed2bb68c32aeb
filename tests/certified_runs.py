"""Two small runs on disk, the verdict over them, the certificate of it."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from isotrain.observe.metrics import MetricsLog
from isotrain.observe.run_directory import RunDirectory
from isotrain.parity.canonical import digest_of
from isotrain.parity.certificate import Certificate, CertifiedModel, Subject, write_certificate
from isotrain.parity.compare import compare
from isotrain.parity.envelope import envelope_level
from isotrain.parity.issue import certificate_of
from isotrain.parity.levels import Check, Level
from isotrain.parity.outcome import outcome_of
from isotrain.parity.paired import paired_level
from isotrain.parity.run import Run
from isotrain.parity.sources.read import read_run
from isotrain.parity.verdict import Verdict, judge

RECIPE = {
    "name": "tiny-sft",
    "seed": 1,
    "model": {"path": "/somebody/models/tiny", "dtype": "bfloat16"},
    "data": {"train": ["/somebody/train.jsonl", "work/more.jsonl"], "validation": None},
    "algorithm": {"name": "sft"},
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]},
}


def run_of(path: Path, shift: float = 0.0, steps: int = 12, reward: bool = True, **device: Any) -> Path:
    """A run whose loss is `shift` away from that of the others."""
    run = RunDirectory.create(
        path,
        "",
        {**RECIPE, "output": str(path), "device": {"type": "cpu", "ranks": 2}, "observe": {"project": "p"}},
        {
            "commit": "ab" * 20,
            "device": {"type": "cpu", "name": "A Processor (R)", "ranks": 2, **device},
            "packages": {"isotrain": "0.1.0", "torch": "2.13.0+cpu", "pyarrow": "26.0.1"},
            "variables": {"OMP_NUM_THREADS": "2", "OMP_PLACES": "/somebody/places"},
            "data": {"train": "cd" * 32},
        },
    )
    with MetricsLog(run.metrics) as log:
        for step in range(1, steps + 1):
            row = {"train/loss": 2 / step + shift * (1 + step / 7), "perf/throughput": 100.0 + step + shift}
            log.append(step, {**row, **({"critic/rewards/mean": step / 10 + shift} if reward else {})})
    return path


MEMBERS = {f"envelope-{n}": 1e-4 * size for n, size in enumerate((2, -2, 1, -1, 1.5, -0.5), start=1)}


def verdict_of(reference: Run, candidate: Run, members: Sequence[Run] = (), **options: Any) -> Verdict:
    comparison = compare(reference, candidate, **options)
    levels = [
        paired_level(comparison, members),
        *([envelope_level(reference, candidate, members)] if members else []),
    ]
    told = Check("told only", 1.5, math.inf, None)
    # One that the curves do not give again, with a limit that is no number.
    probed = Level("P1", "same", "the layers agree", (told,))
    return judge(comparison, outcome_of(comparison, "paired"), [probed, *levels])


def certify(directory: Path, shift: float = 1e-4, **options: Any) -> Certificate:
    """Writes the runs into `directory`; `options` are those of `certificate_of`."""
    runs = {
        role: read_run(run_of(directory / role, amount, reward=options.get("reward", True)))
        for role, amount in {"reference": 0.0, "candidate": shift, **MEMBERS}.items()
    }
    options.pop("reward", None)
    given: dict[str, Any] = {
        "subject": Subject(
            algorithm="sft",
            model=CertifiedModel(name="Tiny-1", parameters=1_234_567, sha256="ef" * 32),
            dtype="bfloat16",
            engine="none",
            kind="paired",
        ),
        "labels": ("cpu-amx", "cpu-avx512"),
        "envelope": {role: runs[role] for role in MEMBERS},
        "inputs": {"layer_trace/steps.safetensors": "01" * 32},
        "date": datetime.datetime(2026, 8, 14, 12, 30, 15, tzinfo=datetime.timezone.utc),
    }
    verdict = verdict_of(runs["reference"], runs["candidate"], [runs[role] for role in MEMBERS])
    return certificate_of(verdict, **{**given, **options})


def written(directory: Path, **options: Any) -> Path:
    return write_certificate(directory / "certificates", certify(directory / "runs", **options))


def rewrite(path: Path, change: Callable[[dict[str, Any]], object], seal: bool = True) -> Path:
    """Changes a certificate as a forger would: `seal` makes the digest fit again."""
    content = json.loads(path.read_text())
    change(content)
    if seal:
        content.pop("digest")
        content["digest"] = digest_of(content)
    path.write_text(json.dumps(content))
    return path


def leaves(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value that holds no others, empty lists and objects among them."""
    children: list[tuple[Any, Any]] = []
    if isinstance(content, dict):
        children = list(content.items())
    elif isinstance(content, list):
        children = list(enumerate(content))
    if not children:
        yield path
    for key, inner in children:
        yield from leaves(inner, (*path, key))


def flip(content: Any, path: tuple[Any, ...]) -> None:
    """Another value of the same kind, as near as there is one."""
    *above, last = path
    for key in above:
        content = content[key]
    value = content[last]
    if isinstance(value, bool):
        content[last] = not value
    elif isinstance(value, int):
        content[last] = value + 1
    elif isinstance(value, float):
        content[last] = math.nextafter(value, math.inf)
    elif isinstance(value, str):
        content[last] = ("b" if value[:1] == "a" else "a") + value[1:]
    else:
        content[last] = {"a": 1} if isinstance(value, dict) else 0
