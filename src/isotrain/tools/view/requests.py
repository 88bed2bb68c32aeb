"""Queries of the page: their names and values, checked and bounded, to JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isotrain.tools.view.parquet import TEXTS
from isotrain.tools.view.run import MOST_TOKENS, RunView
from isotrain.tools.view.trajectories import COMPARISONS, NUMBERS, Condition

MOST_ROWS = 200
_MOST_NAMES = 64
_MOST_CONDITIONS = 16
_LARGEST = 2**53


class BadRequest(Exception):
    """A query that the page would not send."""


Query = Mapping[str, Sequence[str]]


def respond(runs: Sequence[RunView], name: str, query: Query) -> dict[str, Any]:
    """The content of one response; `BadRequest` and `DataError` are for the caller."""
    if name == "state":
        return {"runs": [run.state() for run in runs]}
    if name not in _ABOUT_A_RUN:
        raise BadRequest(f"there is nothing called {name!r}")
    return _ABOUT_A_RUN[name](runs[_whole(query, "run", most=len(runs) - 1)], query)


def _names(run: RunView, query: Query) -> dict[str, Any]:
    return {"names": run.metrics.names()}


def _metrics(run: RunView, query: Query) -> dict[str, Any]:
    names = query.get("name", ())
    if len(names) > _MOST_NAMES:
        raise BadRequest(f"more than {_MOST_NAMES} metrics at a time")
    # What the page has of another epoch is worth nothing: it gets all.
    same = _whole(query, "epoch", default=-1, least=-1) == run.metrics.epoch
    after = _whole(query, "after", default=0)
    return run.metrics.curves(names, after if same else 0)


def _rows(run: RunView, query: Query) -> dict[str, Any]:
    sort = _one(query, "sort", "step")
    if sort not in (*NUMBERS, *TEXTS):
        raise BadRequest(f"there is no column {sort!r}")
    limit = _whole(query, "limit", default=50, least=1, most=MOST_ROWS)
    return run.trajectories.page(
        _conditions(query), sort, _one(query, "order", "down") == "down", _whole(query, "offset", 0), limit
    )


def _conditions(query: Query) -> list[Condition]:
    given = query.get("where", ())
    if len(given) > _MOST_CONDITIONS:
        raise BadRequest(f"more than {_MOST_CONDITIONS} conditions")
    conditions = []
    for text in given:
        column, comparison, value = (*text.split(":", 2), "", "")[:3]
        textual = column in TEXTS and comparison in ("eq", "ne", "has")
        numeric = column in NUMBERS and comparison in COMPARISONS and _is_number(value)
        if not (textual or numeric):
            raise BadRequest(f"{text!r} is not a condition; write a column, a comparison and a value")
        conditions.append(Condition(column, comparison, value))
    return conditions


def _episode(run: RunView, query: Query) -> dict[str, Any]:
    return run.episode(_whole(query, "step"), _whole(query, "rank"), _whole(query, "index"))


def _tokens(run: RunView, query: Query) -> dict[str, Any]:
    part = _one(query, "part", "response")
    if part not in ("prompt", "response"):
        raise BadRequest("part is prompt or response")
    place = (_whole(query, "step"), _whole(query, "rank"), _whole(query, "index"))
    count = _whole(query, "count", default=MOST_TOKENS, least=1, most=MOST_TOKENS)
    return run.tokens(*place, part, _whole(query, "start", 0), count)


def _group(run: RunView, query: Query) -> dict[str, Any]:
    return {"rows": run.group(_whole(query, "step"), _whole(query, "prompt_index", least=-_LARGEST))}


_ABOUT_A_RUN: dict[str, Callable[[RunView, Query], dict[str, Any]]] = {
    "names": _names,
    "metrics": _metrics,
    "rows": _rows,
    "episode": _episode,
    "tokens": _tokens,
    "group": _group,
}


def _one(query: Query, name: str, default: str) -> str:
    values = query.get(name, ())
    return values[0] if values else default


def _whole(
    query: Query, name: str, default: int | None = None, *, least: int = 0, most: int = _LARGEST
) -> int:
    text = _one(query, name, "" if default is None else str(default))
    if not re.fullmatch(r"-?[0-9]{1,16}", text) or not least <= int(text) <= most:
        raise BadRequest(f"{name} is not a whole number from {least} to {most}")
    return int(text)


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text)) and len(text) < 40
    except ValueError:
        return False
