"""Versions of drivers and toolkits, which follow no standard, in order."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

# An end sorts after `8.1.RC1.alpha001` and before `25.3.rc1.2`: what is not final lies below, patches above.
_END = (3, 0)
_STAGES = {"alpha": 0, "a": 0, "t": 0, "beta": 1, "rc": 2}
_NUMBER = 4

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}

Key = tuple[tuple[int, int], ...]


def order(version: str) -> Key:
    """A key to sort by: `8.1.RC1.alpha001` < `8.1.RC1` < `8.1.0`, `9.1.0-beta.1` < `9.1.0`.

    Numbers of builds, as in `24.1.rc1.b030`, do not count.
    """
    key = []
    for stage, number in re.findall(r"([a-z]*)\.?([0-9]{1,9})", version.lower()):
        if stage != "b":
            key.append((_STAGES.get(stage, _NUMBER), int(number)))
    return (*key, _END)


def final(version: str) -> str:
    """The release that a preview of it leads to: `8.1.RC1` for `8.1.RC1.alpha001`."""
    return re.sub(r"[.-](alpha|beta).*", "", version, flags=re.IGNORECASE)


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version is as `wanted` says: `>=8.3.RC1,<9`, or a version alone for that one."""
    return all(_holds(version, part.strip()) for part in wanted.split(","))


def _holds(version: str, part: str) -> bool:
    found = re.match(r"(>=|<=|==|!=|>|<)?\s*(.+)", part)
    assert found, f"not a condition on a version: {part!r}"
    return _COMPARISONS[found[1] or "=="](order(version), order(found[2]))
