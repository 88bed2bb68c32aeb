"""A verdict as one row of a support matrix in Markdown."""

from __future__ import annotations

import html
import re

from isotrain.parity.report.facts import facts
from isotrain.parity.told import number
from isotrain.parity.verdict import Verdict

_LONGEST_CELL = 80


def markdown_row(verdict: Verdict, date: str) -> str:
    """The header, its line and the row; a matrix takes the last line alone."""
    found, curves = facts(verdict), verdict.comparison.curves

    def hundredths(metric: str | None) -> str:
        return "-" if metric is None else number(100 * curves[metric].mean_absolute)

    cells = {
        "algorithm": found.algorithm,
        "model": found.model,
        "reference device": found.reference_device,
        "candidate device": found.candidate_device,
        "outcome": verdict.outcome.verdict,
        "computation": verdict.computation.verdict,
        "levels run": ", ".join(found.levels_run) or "none",
        "mean loss error, in hundredths": hundredths(found.loss),
        "mean reward error, in hundredths": hundredths(found.reward),
        "throughput ratio": number(found.throughput),
        "date": date,
    }
    header, row = " | ".join(cells), " | ".join(map(_safe, cells.values()))
    return f"| {header} |\n|{'---|' * len(cells)}\n| {row} |\n"


def _safe(text: str) -> str:
    """Text that Markdown shows as it is: no cell ends early, no link or tag begins."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text)[:_LONGEST_CELL]
    return html.escape(re.sub(r"([\\`*\[\]|~])", r"\\\1", shown), quote=False)
