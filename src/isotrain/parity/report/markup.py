"""HTML in which every text is escaped unless it was made here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from isotrain.language import said, tr

# A name or message longer than this is an attack or an accident; verdict.json has it whole.
LONGEST_TEXT = 1200
MOST_ROWS = 200


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
