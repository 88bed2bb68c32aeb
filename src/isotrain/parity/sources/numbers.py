"""Numbers as programs print them."""

from __future__ import annotations

import re

# numpy 2 prints the type of a scalar too, torch always does.
_WRAPPED = re.compile(
    r"(?:np\.|numpy\.)?(?:float|int|uint|bool)\d*_?\(([^()]*)\)|tensor\(([^(),]*)(?:,[^()]*)?\)"
)
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_WORDS = {"True": 1.0, "False": 0.0}
_LONGEST = 200
# A float counts whole numbers without gaps up to here.
_EXACT = 2**53


def number(text: str) -> float | None:
    """The value, NaN and infinities included; None for what is not a number."""
    if len(text) > _LONGEST or "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    found = _WRAPPED.fullmatch(text)
    return number(found[1] or found[2] or "") if found else None


def whole_number(value: object) -> int | None:
    """A step from text or JSON; `3.0` is one, because tables with gaps are written so; `3.5` is not."""
    if isinstance(value, str):
        value = value.strip()
        value = int(value) if _WHOLE.fullmatch(value) else number(value)
    if isinstance(value, float):
        value = int(value) if abs(value) <= _EXACT and value.is_integer() else None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -(2**63) <= value < 2**63 else None
