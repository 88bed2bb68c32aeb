"""A run's page as one file: all curves, and a bounded number of trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.errors import RecipeError
from isotrain.observe.run_directory import write_atomically
from isotrain.tools.view.page import whole_page
from isotrain.tools.view.run import RunView

# Of each response and prompt; what is cut is counted on the page.
_RESPONSE_TOKENS, _PROMPT_TOKENS = 4_096, 1_000
# A screen shows no more points of a curve; longer runs are thinned.
_MOST_POINTS = 4_000


def export(runs: Sequence[RunView], out: Path, trajectories: int) -> tuple[int, int]:
    """Write the page; returns how many trajectories of how many are in it."""
    contents = [_run(run, trajectories) for run in runs]
    try:
        write_atomically(out, whole_page({"runs": contents}))
    except OSError as error:
        raise RecipeError(
            f"--export: {out} cannot be written ({error.strerror or error}); "
            "give a file in a writable directory"
        ) from error
    shown = sum(len(content["rows"]) for content in contents)
    return shown, sum(content["state"]["trajectories"]["rows"] for content in contents)


def _run(run: RunView, most: int) -> dict[str, Any]:
    run.refresh()
    rows: list[dict[str, Any]] = []
    episodes: dict[str, Any] = {}
    pieces: dict[int, list[Any]] = {}
    for step, prompt_index in _spread(run.trajectories.groups(), most):
        for row in run.group(step, prompt_index)[: most - len(rows)]:
            episode = run.episode(step, row["rank"], row["index"], _PROMPT_TOKENS, _RESPONSE_TOKENS)
            for part in ("prompt", "response"):
                # Most tokens occur many times: their texts are kept once.
                pieces |= episode[part].pop("pieces")
            rows.append(row)
            episodes[f"{step}-{row['rank']}-{row['index']}"] = episode
    return {
        "state": run.state(),
        "names": run.metrics.names(),
        "curves": _curves(run),
        "rows": rows,
        "episodes": episodes,
        "pieces": pieces,
    }


def _spread(groups: Sequence[tuple[int, int, int]], most: int) -> list[tuple[int, int]]:
    """Whole groups from steps that are spread evenly over the run, the first and the last among them."""
    by_step: dict[int, list[tuple[int, int, int]]] = {}
    for group in groups:
        by_step.setdefault(group[0], []).append(group)
    if not by_step or most < 1:
        return []
    steps = sorted(by_step)
    count = max(1, most // max(1, round(sum(size for *_, size in groups) / len(groups))))
    places = np.unique(np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int))
    chosen: list[tuple[int, int]] = []
    left, turn = most, 0
    while left > 0 and any(turn < len(by_step[steps[i]]) for i in places):
        for i in places:
            of_step = by_step[steps[i]]
            if left > 0 and turn < len(of_step):
                chosen.append(of_step[turn][:2])
                left -= of_step[turn][2]
        turn += 1
    return sorted(chosen)


def _curves(run: RunView) -> dict[str, Any]:
    curves = {}
    for name in run.metrics.names():
        curve = run.metrics.curves([name], most=1 << 31)["curves"][name]
        stride = -(-len(curve["steps"]) // _MOST_POINTS)
        curves[name] = {key: values[::stride] for key, values in curve.items()}
    return curves
