"""Final answers of GSM8K compared as text, with verl's rules, so that scores agree with theirs."""

from __future__ import annotations

import re
from typing import Any, Literal

# Only the end is read: it bounds the work, and an answer answered early and then doubted does not count.
TAIL = 300
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")
# What `find_answer` can give; a strict answer has lost its commas.
_COMPARABLE = {"strict": re.compile(r"-?[0-9.]+"), "flexible": _NUMBER}


def find_answer(response: str, method: Literal["strict", "flexible"]) -> str | None:
    """The last answer in the text, or None; `strict` takes only what follows `#### `."""
    tail = response[-TAIL:]
    if method == "strict":
        marked = _MARKED.findall(tail)
        return marked[-1].replace(",", "").replace("$", "") if marked else None
    numbers = _NUMBER.findall(tail)
    # A lone full stop is the end of a sentence. Where there is nothing else, it counts as a wrong answer.
    return next((number for number in reversed(numbers) if number != "."), numbers[0] if numbers else None)


def right_answer(value: Any, method: Literal["strict", "flexible"]) -> str | None:
    """A row's reference answer as text, or None if no answer that is found could ever equal it."""
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    return text if _COMPARABLE[method].fullmatch(text) else None


def gsm8k_score(
    response: str, answer: str, method: Literal["strict", "flexible"] = "strict", format_score: float = 0.0
) -> float:
    """1 for the right answer, `format_score` for another one, 0 for none."""
    answered = find_answer(response, method)
    if answered is None:
        return 0.0
    return 1.0 if answered == answer else format_score
