"""Whole numbers in a shell's `$((...))`, computed from the syntax tree."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from isotrain.imports.source import Unknown

Lookup = Callable[[str], str | Unknown]

LARGEST = 2**63
_MOST_DEPTH = 40
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    # A shell cuts towards zero.
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    ">": lambda a, b: int(a > b),
    ">=": lambda a, b: int(a >= b),
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "&&": lambda a, b: int(bool(a and b)),
    "||": lambda a, b: int(bool(a or b)),
}


def calculate(node: Any, lookup: Lookup, depth: int = 0) -> int | Unknown:
    """The value of an expression of whole numbers and variables."""
    text = node.text.decode("utf-8", "replace")
    children = [child for child in node.children if child.type not in ("(", ")", "${", "}", "$")]
    if depth > _MOST_DEPTH:
        return Unknown("the arithmetic is too deeply nested")
    if node.type in ("number", "word") and re.fullmatch(r"\d{1,18}", text):
        return int(text)
    is_name = node.type == "word" and re.fullmatch(r"[A-Za-z_]\w*", text)
    if is_name or node.type in ("variable_name", "simple_expansion", "expansion"):
        name = text.strip("${}")
        value = lookup(name) if re.fullmatch(r"\w+", name) else Unknown(f"{text} is not read")
        if isinstance(value, Unknown):
            return value
        return (
            int(value) if re.fullmatch(r"-?\d{1,18}", value) else Unknown(f"{name} is {value!r}, no number")
        )
    if node.type == "parenthesized_expression" and len(children) == 1:
        return calculate(children[0], lookup, depth + 1)
    if node.type == "unary_expression" and len(children) == 2 and children[0].type in ("-", "+", "!"):
        inner = calculate(children[1], lookup, depth + 1)
        if children[0].type == "!" and not isinstance(inner, Unknown):
            return int(inner == 0)
        return inner if isinstance(inner, Unknown) or children[0].type == "+" else -inner
    if node.type == "binary_expression" and len(children) == 3 and children[1].type in _OPERATORS:
        left = calculate(children[0], lookup, depth + 1)
        right = calculate(children[2], lookup, depth + 1)
        if isinstance(left, Unknown):
            return left
        if isinstance(right, Unknown):
            return right
        if children[1].type in ("/", "%") and right == 0:
            return Unknown(f"{text} divides by zero")
        result = _OPERATORS[children[1].type](left, right)
        return result if abs(result) < LARGEST else Unknown(f"{text} is too large")
    return Unknown(f"{text} is not read")
