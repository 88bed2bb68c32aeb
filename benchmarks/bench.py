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
    """Median and range of repeated measurements; `report` shows that of a single one as what it is."""
    return {
        "median": _rounded(statistics.median(values)),
        "min": _rounded(min(values)),
        "max": _rounded(max(values)),
        "count": len(values),
    }


def report(name: str, ratio: float, goal: float | None, met: bool | None, **figures: object) -> None:
    """One JSON object on a line: after each turn with what is known so far, and so the last line is final.

    `met` is None where this size cannot tell, or there is no goal. `ratios` is the spread of the ratio.
    """
    line: dict[str, object] = {"name": name, "ratio": float(f"{ratio:.4g}"), "goal": goal, "met": met}
    ratios = figures.get("ratios")
    if isinstance(ratios, dict) and "count" in ratios:
        line["turns"] = ratios["count"]
        if ratios["count"] == 1:
            line["note"] = "one turn: the ratio has no spread"
            figures = {key: value for key, value in figures.items() if key != "ratios"}
        elif goal is not None and ratios["min"] <= goal <= ratios["max"]:
            line["note"] = "inconclusive: turns lie on both sides of the goal"
    show(**line, **figures)


def show(**fields: object) -> None:
    """A line of a table; ends with an error where a figure is not a number."""
    shown = {key: _without_empty_ranges(value) for key, value in fields.items()}
    print(json.dumps({**shown, **({"quick": True} if QUICK else {})}, allow_nan=False), flush=True)


def _rounded(value: float) -> float:
    """Digits count, not places: a share of 2e-05 is not 0."""
    return float(f"{value:.6g}")


def _without_empty_ranges(value: object) -> object:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"median", "min", "max", "count"} and value["count"] == 1:
        return {"value": value["median"], "count": 1}
    return {key: _without_empty_ranges(inner) for key, inner in value.items()}
