"""Adds the last line of benchmarks to their history, and draws it.

    python benchmarks/supervised_overhead.py --quick | tail -n 1 >> lines.jsonl
    python .ci/history.py lines.jsonl history.jsonl --commit COMMIT --plot history.png

A line of the history has the commit, the day, and each benchmark's ratio over its goal: below 1 it is met.
Lines of one commit replace each other.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from pathlib import Path
from typing import Any


def added(
    history: list[dict[str, Any]], lines: list[dict[str, Any]], commit: str, day: str
) -> list[dict[str, Any]]:
    """The history with one more row, of those ratios that are numbers."""
    shares = {
        line["name"]: round(line["ratio"] / line["goal"], 4)
        for line in lines
        if isinstance(line.get("ratio"), int | float) and line.get("goal") and math.isfinite(line["ratio"])
    }
    return [
        *(row for row in history if row["commit"] != commit),
        {"commit": commit, "day": day, "shares": shares},
    ]


def draw(history: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    for name in sorted({name for row in history for name in row["shares"]}):
        rows = [(number, row["shares"][name]) for number, row in enumerate(history) if name in row["shares"]]
        axes.plot(*zip(*rows, strict=True), marker="o", markersize=3, label=name)
    axes.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    axes.set_xticks(
        range(len(history)), [f"{row['day']}\n{row['commit'][:7]}" for row in history], fontsize=7
    )
    axes.set_ylabel("ratio over its goal (below 1: met)")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def read(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lines", type=Path)
    parser.add_argument("history", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    day = datetime.date.today().isoformat()
    history = added(read(options.history), read(options.lines), options.commit, day)
    options.history.write_text("".join(f"{json.dumps(row)}\n" for row in history))
    if options.plot is not None:
        draw(history, options.plot)


if __name__ == "__main__":
    main()
