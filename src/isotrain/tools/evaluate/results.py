"""Results of an evaluation: scores with intervals, what has no score, tables and curves.

I: items (rows of the data).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isotrain.errors import DataError
from isotrain.files import parse_json, read_regular
from isotrain.observe.run_directory import LARGEST_JSON, write_atomically
from isotrain.rollout.validation import mean_by_source
from isotrain.tools.evaluate.log import RESULTS, Item
from isotrain.tools.evaluate.statistics import Comparison, compare, estimate, pass_at_k

if TYPE_CHECKING:
    from rich.table import Table

_ALL = "all rows"
INCOMPLETE = 3
"""Exit code of an evaluation in which some rows or responses have no score."""


def results_of(items: Sequence[Item], ks: Sequence[int], correct: float) -> dict[str, Any]:
    """Results by data source and of all rows; `correct` is the score of a right answer."""
    n = len(items[0].responses)
    ks = sorted({*ks} or _powers(n))
    return {
        "responses_per_row": n,
        "correct_from": correct,
        "results": {name: _part(part, n, ks, correct) for name, part in _by_source(items).items()},
    }


def _by_source(items: Sequence[Item]) -> dict[str, list[Item]]:
    """Rows of each data source, and all of them where there are several."""
    sources = list(dict.fromkeys(item.source for item in items))
    parts = {source: [item for item in items if item.source == source] for source in sources}
    if len(sources) > 1:
        name = _ALL
        while name in parts:  # a source may have any name
            name += "*"
        parts[name] = list(items)
    return parts


def _powers(n: int) -> set[int]:
    return {1 << power for power in range(n.bit_length()) if 1 << power <= n}


def _part(items: Sequence[Item], n: int, ks: Sequence[int], correct: float) -> dict[str, Any]:
    responses = [response for item in items for response in item.responses]
    counts_I = [sum(r.failure is None and r.score >= correct for r in item.responses) for item in items]
    metrics = {f"mean@{n}": estimate(item_means(items))}
    for k in ks:
        metrics[f"pass@{k}"] = estimate([pass_at_k(n, count, k) for count in counts_I])
    answered = [response for item in items if not item.too_long for response in item.responses]
    failures = Counter(response.failure for response in responses if response.failure is not None)
    return {
        "rows": len(items),
        "responses": len(responses),
        "metrics": {name: value.as_json() for name, value in metrics.items()},
        "too_long_prompts": sum(item.too_long for item in items),
        "cut_prompts": sum(item.prompt_cut for item in items),
        "truncated_responses": sum(not response.finished for response in answered),
        "without_score": dict(sorted(failures.items())),
        "first_failure": next((r.detail for r in responses if r.failure is not None), ""),
        "mean_response_tokens": float(np.mean([r.tokens for r in answered])) if answered else 0.0,
    }


def item_means(items: Sequence[Item]) -> list[float]:
    """The mean score of each row's responses."""
    scores = np.array([[response.score for response in item.responses] for item in items])
    return mean_by_source([_ALL] * len(items), scores)[_ALL]


def is_complete(results: Mapping[str, Any]) -> bool:
    """Whether each row was answered and each response has a score."""
    return not any(part["too_long_prompts"] or part["without_score"] for part in results["results"].values())


def write_results(directory: Path, results: Mapping[str, Any]) -> None:
    write_atomically(directory / RESULTS, json.dumps(results, indent=2, ensure_ascii=False) + "\n")


def read_results(directory: Path) -> dict[str, Any]:
    results = parse_json(read_regular(directory / RESULTS, LARGEST_JSON))
    assert isinstance(results, dict)
    return results


def table_of(columns: Mapping[str, Mapping[str, Any]]) -> Table:
    """Results of one or several models, each a column."""
    from rich.table import Table
    from rich.text import Text

    table = Table("data", "", box=None, pad_edge=False)
    for name in columns:
        table.add_column(Text(name), justify="right", overflow="fold")
    first = next(iter(columns.values()))
    for source, part in first["results"].items():
        parts = [results["results"][source] for results in columns.values()]
        for number, metric in enumerate(part["metrics"]):
            cells = [_interval(each["metrics"][metric]) for each in parts]
            table.add_row(Text(source if not number else ""), metric, *cells)
        table.add_row("", "rows x responses", *(_size(each) for each in parts))
        for name, key in _COUNTS.items():
            if any(values := [_count(each, key) for each in parts]):
                table.add_row("", name, *map(str, values))
    return table


_COUNTS = {
    "prompts too long (wrong)": "too_long_prompts",
    "prompts cut": "cut_prompts",
    "responses cut": "truncated_responses",
    "without score": "without_score",
}


def _count(part: Mapping[str, Any], key: str) -> int:
    return sum(part[key].values()) if isinstance(part[key], dict) else int(part[key])


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.4f} [{value['low']:.4f}, {value['high']:.4f}]"


def _size(part: Mapping[str, Any]) -> str:
    return f"{part['rows']:,} x {part['responses'] // part['rows']}"


def compare_items(first: Sequence[Item], second: Sequence[Item]) -> dict[str, Comparison]:
    """Second minus first by data source, over the same rows."""
    if [(item.row, item.values) for item in first] != [(item.row, item.values) for item in second]:
        raise DataError("the two evaluations are not of the same rows")
    others = _by_source(second)
    return {
        name: compare(item_means(part), item_means(others[name])) for name, part in _by_source(first).items()
    }


def comparison_line(name: str, comparison: Comparison) -> str:
    difference = comparison.difference
    if not comparison.differs:
        outcome = "no difference shown"
    else:
        outcome = "the second is better" if difference.mean > 0 else "the first is better"
    return (
        f"{name}: second minus first {difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}], "
        f"better on {comparison.better:,} rows, worse on {comparison.worse:,}, p = {comparison.p_value:.2g}: "
        f"{outcome}"
    )


def draw_curve(path: Path, title: str, by_step: Mapping[int, Mapping[str, Any]]) -> None:
    """The mean score of each checkpoint with its interval, for each data source."""
    from isotrain.observe.plots import BLUE, GREEN, ORANGE, PURPLE, RED, as_png, finish, new_figure, plain

    steps = sorted(by_step)
    figure, (axes,) = new_figure("evaluation", title, 1)
    first = by_step[steps[0]]["results"]
    for (source, part), colour in zip(first.items(), cycle((BLUE, ORANGE, GREEN, PURPLE, RED)), strict=False):
        metric = next(iter(part["metrics"]))
        values = [by_step[step]["results"][source]["metrics"][metric] for step in steps]
        mean, low, high = (np.array([v[key] for v in values]) for key in ("mean", "low", "high"))
        errors = np.maximum(0.0, [mean - low, high - mean])
        label = plain(f"{source}, {metric}")
        axes.errorbar(steps, mean, yerr=errors, color=colour, marker="o", capsize=4, linewidth=2, label=label)
    finish(axes, "score, 95 % interval")
    write_atomically(path, as_png(figure))
