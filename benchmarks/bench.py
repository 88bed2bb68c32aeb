"""What the benchmarks share: where data is, and the one form in which results are printed."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def gsm8k() -> Path:
    """The published GSM8K files, from `ISOTRAIN_SHARED`, by default `../shared` beside the repository."""
    shared = Path(os.environ.get("ISOTRAIN_SHARED") or REPOSITORY.parent / "shared")
    path = shared / "data" / "gsm8k"
    if not path.is_dir():
        raise SystemExit(
            f"no GSM8K at {path}: set ISOTRAIN_SHARED to a directory with data/gsm8k/train.jsonl"
        )
    return path


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range of repeated measurements."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "count": len(values),
    }


def report(name: str, ratio: float, goal: float, met: bool, **figures: object) -> None:
    """The last line of every benchmark: one JSON object."""
    print(json.dumps({"name": name, "ratio": round(ratio, 4), "goal": goal, "met": met, **figures}))
