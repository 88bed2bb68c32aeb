"""What the benchmarks share: their options, where data is, and the one form in which results are printed."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

REPOSITORY = Path(__file__).resolve().parent.parent
QUICK = "--quick" in sys.argv
# Processors without units for bfloat16 compute in it far more slowly than in float32.
DTYPE: Literal["float32", "bfloat16"] = "float32" if QUICK else "bfloat16"


class Options(argparse.ArgumentParser):
    """Of a benchmark; with `--quick`, `quick` are the defaults of the others."""

    def __init__(self, doc: str | None, **quick: Any) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._quick = quick
        self.add_argument(
            "--quick", action="store_true", help="a first impression in 5 minutes: float32, few turns"
        )

    def read(self) -> argparse.Namespace:
        if QUICK:
            self.set_defaults(**self._quick)
        return self.parse_args()


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
    """One JSON object on a line: after each turn with what is known so far, and so the last line is final."""
    line = {"name": name, "ratio": round(ratio, 4), "goal": goal, "met": met}
    print(json.dumps({**line, **({"quick": True} if QUICK else {}), **figures}), flush=True)
