"""A verdict as one row of a support matrix in Markdown."""

from __future__ import annotations

import html
import re

from isotrain.parity.report.facts import facts
from isotrain.parity.told import number
from isotrain.parity.verdict import Verdict

COLUMNS = (
    "algorithm",
    "model",
    "reference device",
    "candidate device",
    "verdict",
    "levels run",
    "mean loss error, in hundredths",
    "mean reward error, in hundredths",
    "throughput ratio",
    "date",
)
_LONGEST_CELL = 80


def markdown_row(verdict: Verdict, date: str) -> str:
    """The header, its line and the row; a matrix takes the last line alone."""
    found, curves = facts(verdict), verdict.comparison.curves

    def hundredths(metric: str | None) -> str:
        return "-" if metric is None else number(100 * curves[metric].mean_absolute)

    cells = (
        found.algorithm,
        found.model,
        found.reference_device,
        found.candidate_device,
        verdict.outcome,
        ", ".join(found.levels_run) or "none",
        hundredths(found.loss),
        hundredths(found.reward),
        number(found.throughput),
        date,
    )
    lines = [_line(COLUMNS), "|" + "---|" * len(COLUMNS), _line([_safe(cell) for cell in cells])]
    return "\n".join(lines) + "\n"


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _safe(text: str) -> str:
    """Text that Markdown shows as it is: no cell ends early, no link or tag begins."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text)[:_LONGEST_CELL]
    return html.escape(re.sub(r"([\\`*\[\]|~])", r"\\\1", shown), quote=False)
