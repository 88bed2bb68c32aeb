"""Two small runs on disk, the verdict over them, the certificate of it."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.observe.metrics import MetricsLog
from isotrain.observe.run_directory import RunDirectory
from isotrain.tools.parity.certify.certificate import Certificate, digest_of, write_certificate
from isotrain.tools.parity.certify.issue import certificate_of
from isotrain.tools.parity.compare.comparison import compare
from isotrain.tools.parity.compare.outcome import outcome_of
from isotrain.tools.parity.devices import why_untraced
from isotrain.tools.parity.levels.envelope import envelope_level
from isotrain.tools.parity.levels.level import Check, Level, not_run
from isotrain.tools.parity.levels.paired import paired_level
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.run import RunLog
from isotrain.tools.parity.verdict import Verdict, judge

RECIPE: dict[str, Any] = {
    "name": "tiny-sft",
    "seed": 1,
    "model": {"path": "/somebody/models/Tiny-1", "dtype": "bfloat16"},
    "data": {"train": ["/somebody/train.jsonl", "work/more.jsonl"], "validation": None},
    "algorithm": {"name": "sft"},
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]},
    "trainer": {"steps": 12},
}
ENVIRONMENT: dict[str, Any] = {
    "time": "2026-08-14T12:00:00+00:00",
    "command": ["isotrain", "train", "/somebody/recipe.yaml"],
    "commit": "ab" * 20,
    "python": "3.12.3",
    "platform": "Linux-6.1-x86_64-with-glibc2.36",
    "machine": "x86_64",
    "cpu": {"model": "A Processor (R)", "count": 8, "features": ["amx_tile", "avx2", "avx512f"]},
    "device": {"type": "cpu", "name": "A Processor (R)", "ranks": 2},
    "packages": {
        "isotrain": "0.1.0",
        "torch": "2.13.0+cpu",
        "transformers": "5.19.0",
        "pyarrow": "26.0.1",
    },
    "variables": {"OMP_NUM_THREADS": "2", "OMP_PLACES": "/somebody/places"},
    "data": {"train": "cd" * 32, "model": "ef" * 32},
    "model": {"type": "llama", "parameters": 1_234_567},
}
# Sections of the environment of the two sides: one processor, held to two of its instruction sets.
SIDES: dict[str, dict[str, Any]] = {
    "reference": {"variables": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}},
    "candidate": {"variables": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}},
}
_TRACE = "layer_trace/steps.safetensors"
# Two ranks that compute each micro-batch together; such runs record no layers.
MESHED = {
    "device": {
        "ranks": 2,
        "mesh": {"replicas": 1, "context": 2, "context_attention": "ring", "expert": 1},
    }
}
SIMULATED = {
    "device": {"type": "npu", "name": "Ascend910B3-sim"},
    "packages": {"torch-npu": "2.13.0+sim"},
}


def run_of(
    path: Path,
    shift: float = 0.0,
    steps: int = 12,
    reward: bool = True,
    recipe: Mapping[str, Any] | None = None,
    **sections: Any,
) -> Path:
    """A run whose loss is `shift` away from that of the others; `sections` are added to its environment."""
    environment = {
        name: {**value, **sections.get(name, {})} if isinstance(value, dict) else sections.get(name, value)
        for name, value in ENVIRONMENT.items()
    }
    device = {
        name: environment["device"][name]
        for name in ("type", "ranks", "mesh")
        if name in environment["device"]
    }
    run = RunDirectory.create(
        path,
        "",
        {**RECIPE, **(recipe or {}), "output": str(path), "device": device, "observe": {"project": "p"}},
        environment,
    )
    with MetricsLog(run.metrics) as log:
        for step in range(1, steps + 1):
            row = {"train/loss": 2 / step + shift * (1 + step / 7), "perf/throughput": 100.0 + step + shift}
            log.append(step, {**row, **({"critic/rewards/mean": step / 10 + shift} if reward else {})})
    return path


MEMBERS = {f"envelope-{n}": 1e-4 * size for n, size in enumerate((2, -2, 0.9, -1, 1.5, -0.5), start=1)}


def verdict_of(
    reference: RunLog, candidate: RunLog, members: Sequence[RunLog] = (), **options: Any
) -> Verdict:
    comparison = compare(reference, candidate, **options)
    levels = [
        paired_level(comparison, members),
        *([envelope_level(reference, candidate, members)] if members else []),
    ]
    if why := why_untraced(reference, candidate):
        probed = not_run("P1", why)
    else:
        told = Check("told only", 1.5, math.inf, None)
        # One that the curves do not give again, with a limit that is no number.
        probed = Level("P1", "same", "the layers agree", (told,))
    return judge(comparison, outcome_of(comparison, "paired"), [probed, *levels])


def certify(
    directory: Path,
    shift: float = 1e-4,
    *,
    reward: bool = True,
    recipe: Mapping[str, Any] | None = None,
    candidate: Mapping[str, Any] | None = None,
) -> Certificate:
    """Writes the runs into `directory`; `candidate` are sections of its environment."""
    sections = {**SIDES, "candidate": dict(candidate or SIDES["candidate"])}
    runs = {
        role: read_run(
            run_of(
                directory / role,
                amount,
                reward=reward,
                recipe=recipe,
                **sections.get(role, SIDES["reference"]),
            )
        )
        for role, amount in {"reference": 0.0, "candidate": shift, **MEMBERS}.items()
    }
    verdict = verdict_of(runs["reference"], runs["candidate"], [runs[role] for role in MEMBERS])
    traced = () if verdict.level("P1").state == "not run" else ("reference", "candidate")
    traces = {f"{role}/{_TRACE}": trace(directory / role) for role in traced}
    return certificate_of(
        verdict,
        inputs=traces,
        date=datetime.datetime(2026, 8, 14, 12, 30, 15, tzinfo=datetime.timezone.utc),
    )


def trace(run: Path) -> str:
    """A file beside the metrics, and its digest."""
    (run / _TRACE).parent.mkdir()
    (run / _TRACE).write_text(run.name)
    return hashlib.sha256(run.name.encode()).hexdigest()


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
