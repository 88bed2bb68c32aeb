"""Does the simulator reproduce figures that were measured, and what does it expect at scale?

First all figures that were measured here or published, with the simulator's error. `ratio` is the median of
the absolute errors of those that no parameter was fitted to; `by_source` has it for each source, because a
case with many figures weighs more. Lower is better. Then predictions for 1,024 to 102,400 devices, for which
nothing was measured. Everything is simulated: no device is used, and results depend on the seed only.
`--markdown` prints the tables of docs/scale.md to stderr.

    python benchmarks/simulated_scale.py [--markdown] [--no-predictions]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import bench
import simulated_here as here
import simulated_published as published
from simulated_figures import FITTED, HELD_OUT, UNFITTED, Figure, table
from simulated_predictions import DENSE, MIXTURE, MODES, SLICE, central, predict, routes

GOAL = 0.25
CASES = (
    *(here.recipe_steps, here.asynchrony, here.work_stealing, here.controller),
    *(published.weight_sync, published.verl_logs, published.areal, published.verl_fully_async),
    published.rollpacker,
)
QUICK_CASES = (
    here.asynchrony,
    here.work_stealing,
    here.controller,
    published.weight_sync,
    published.verl_logs,
)
DEVICES = (1024, 10240, 102400)
PROMPTS_A_SLICE, FIXED_PROMPTS = 512, 1024


def errors(figures: Sequence[Figure], *kinds: str) -> list[float]:
    return [abs(figure.error) for figure in figures if figure.kind in kinds]


def by_source(figures: Sequence[Figure]) -> dict[str, dict[str, float]]:
    of = {
        source: [f for f in figures if f.source == source]
        for source in dict.fromkeys(f.source for f in figures)
    }
    free = {source: errors(some, HELD_OUT, UNFITTED) for source, some in of.items()}
    return {source: bench.spread(some) for source, some in free.items() if some}


def tell(figures: Sequence[Figure], predictions: Sequence[dict[str, Any]], centrals: Sequence[Any]) -> None:
    free = errors(figures, HELD_OUT, UNFITTED)
    median = statistics.median(free)
    bench.report(
        "simulated_scale",
        median,
        goal=GOAL,
        met=None if bench.QUICK else median <= GOAL,  # quick leaves out the cases with the largest errors
        free_figures=len(free),
        fitted_figures=len(errors(figures, FITTED)),
        within_25_percent=sum(error <= 0.25 for error in free),
        largest_error=round(max(free), 3),
        by_source=by_source(figures),
        figures=[figure.row() for figure in figures],
        predictions=list(predictions),
        central=list(centrals),
        routes=routes(),
        label="simulated",
    )


def rows(values: Sequence[dict[str, Any]]) -> str:
    names = list(values[0])
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    return "\n".join(
        lines + ["| " + " | ".join(str(value[name]) for name in names) + " |" for value in values]
    )


def main() -> None:
    parser = bench.Options(__doc__, no_predictions=True)
    parser.add_argument("--markdown", action="store_true", help="print tables to stderr")
    parser.add_argument("--no-predictions", action="store_true", help="only the figures that were measured")
    options = parser.read()
    figures: list[Figure] = []
    for case in QUICK_CASES if bench.QUICK else CASES:
        figures += case()
        print(f"{case.__name__}: {len(figures)} figures so far", file=sys.stderr, flush=True)
    tell(figures, [], [])
    predictions: list[dict[str, Any]] = []
    centrals: list[dict[str, Any]] = []
    for case_ in () if options.no_predictions else (DENSE, MIXTURE):
        for devices in DEVICES:
            slices = devices // SLICE
            for prompts, parts in ((PROMPTS_A_SLICE * slices, slices), (FIXED_PROMPTS, 1)):
                centrals.append(central(case_, devices, prompts))
                for mode, steps in MODES.items():
                    predictions.append(predict(case_, devices, prompts, mode, parts, steps))
                    print(predictions[-1], file=sys.stderr, flush=True)
        tell(figures, predictions, centrals)
    if options.markdown:
        print(table(figures), file=sys.stderr)
        for values in (routes(), predictions, centrals):
            if values:
                print(rows(values), file=sys.stderr)


if __name__ == "__main__":
    main()
