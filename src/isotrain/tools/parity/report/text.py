"""Numbers and text as people and programs get them: statistics in words, escaped HTML, plain JSON."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from isotrain.language import said, tr
from isotrain.tools.parity.compare.effects import WindowEffect
from isotrain.tools.parity.compare.statistics import Apart, Interval

WINDOW_COLUMNS = (
    tr("window"),
    tr("reference"),
    tr("candidate"),
    tr("difference"),
    tr("95 % interval"),
)
# A name or message longer than this is an attack or an accident; verdict.json has it whole.
LONGEST_TEXT = 1200
MOST_ROWS = 200


def number(value: float | None) -> str:
    """Three digits; `-` for what is not known."""
    if value is None:
        return "-"
    if math.isfinite(value):
        return f"{value:.3g}"
    return tr("not a number") if math.isnan(value) else tr("infinite")


def interval(bounds: Interval | None) -> str:
    return "-" if bounds is None else tr("{low} to {high}", low=number(bounds.low), high=number(bounds.high))


def window_cells(effect: WindowEffect) -> tuple[str, ...]:
    """Under `WINDOW_COLUMNS`."""
    means = (effect.reference, effect.candidate, effect.difference)
    return (effect.window, *map(number, means), interval(effect.interval))


STATISTICS: tuple[tuple[str, Callable[[Apart], str]], ...] = (
    (tr("steps compared"), lambda a: f"{a.steps:,}"),
    (tr("mean absolute error, in hundredths"), lambda a: number(100 * a.mean_absolute)),
    (tr("mean relative error, in %"), lambda a: number(a.mean_relative and 100 * a.mean_relative)),
    (tr("first step"), lambda a: number(a.first)),
    (tr("largest (at step)"), lambda a: f"{number(a.largest)} ({a.largest_at})"),
    (tr("signed mean"), lambda a: number(a.signed_mean)),
    (tr("the curves part at step"), lambda a: "-" if a.parts_at is None else str(a.parts_at)),
    (
        tr("correlation of changes"),
        lambda a: "-" if a.change_correlation is None else f"{a.change_correlation:.4f}",
    ),
    (tr("share of a flat line's error"), lambda a: number(a.share_of_flat)),
)


def plain(value: Any) -> Any:
    """The same in words that every JSON reader knows; numbers that are not finite as in metrics.jsonl."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, str | int):
        return value
    # Of numpy, its numbers and arrays; of all else, such as paths, the text.
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


class Markup(str):
    """HTML that is ready; any other string is text."""


def text(value: object) -> Markup:
    if isinstance(value, Markup):
        return value
    full = said(value) if isinstance(value, str) else str(value)
    # What cannot be printed would hide or turn round what stands beside it.
    shown = "".join(
        letter if letter.isprintable() else " " if letter.isspace() else "\N{REPLACEMENT CHARACTER}"
        for letter in full[:LONGEST_TEXT]
    )
    left = len(full) - LONGEST_TEXT
    more = said(tr(" … ({count:,} more characters)", count=left)) if left > 0 else ""
    return Markup(html.escape(shown) + more)


def element(tag: str, *children: object, **attributes: str) -> Markup:
    """Attributes are escaped as the children are; `class_` is `class`."""
    named = "".join(f' {name.rstrip("_")}="{text(value)}"' for name, value in attributes.items())
    return Markup(f"<{tag}{named}>{joined(children)}</{tag}>")


def joined(children: Iterable[object]) -> Markup:
    return Markup("".join(text(child) for child in children))


def table(columns: Sequence[object], rows: Sequence[Sequence[object]], most: int = MOST_ROWS) -> Markup:
    """Scrolls sideways by itself where the screen is narrow; tells how many rows it leaves out."""
    head = element("thead", element("tr", *(element("th", column, scope="col") for column in columns)))
    body = element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows[:most]))
    return joined([element("div", element("table", head, body), class_="wide"), _rest(len(rows), most)])


def bullets(lines: Sequence[object], most: int = MOST_ROWS) -> Markup:
    return joined([element("ul", *(element("li", line) for line in lines[:most])), _rest(len(lines), most)])


def details(summary: object, *children: object) -> Markup:
    return element("details", element("summary", summary), *children)


def _rest(count: int, most: int) -> Markup:
    if count <= most:
        return Markup()
    return element(
        "p", tr("and {count:,} more: verdict.json has them all", count=count - most), class_="rest"
    )
