"""Nodes of a shell script's syntax tree: their text, their lines, tests and arithmetic."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from isotrain.tools.imports.source import SECRET, ImportSourceError, Unknown

SETTERS = ("read", "mapfile", "readarray", "getopts", "let", "printf", "wait")
NAME = re.compile(r"[A-Za-z_]\w*")
_LARGEST = 2**63
_MOST_DEPTH = 40
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    # A shell cuts towards zero.
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&&": lambda a, b: bool(a and b),
    "||": lambda a, b: bool(a or b),
}
_COMPARISONS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


def parser() -> Any:
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ModuleNotFoundError:
        raise ImportSourceError(
            "shell scripts need a parser: pip install 'isotrain[import]'; a resolved configuration "
            "(.hydra/config.yaml) or a log is read without it"
        ) from None
    return Parser(Language(tree_sitter_bash.language()))


def arithmetic(text: str) -> Any | None:
    """The node of `$((...))`, parsed on its own."""
    tree = parser().parse(f"x={text}\n".encode())
    return next((node for node in below(tree.root_node) if node.type == "arithmetic_expansion"), None)


def below(node: Any) -> Iterator[Any]:
    waiting = [node]
    while waiting:
        yield (part := waiting.pop())
        waiting += reversed(part.named_children)


def text(node: Any) -> str:
    return str(node.text.decode("utf-8", "replace")) if node is not None else ""


def items(node: Any) -> list[Any]:
    """The parts of a list without its comments."""
    return [child for child in node.named_children if child.type != "comment"]


def line(node: Any) -> int:
    return int(node.start_point[0]) + 1


def short(node: Any) -> str:
    """The text of a node for messages: one line, without what follows the name of a secret."""
    plain = " ".join(text(node)[:2000].split())[:200]
    hidden = re.sub(r"(?i)((?:key|token|secret|password)\w*[=\s]+)\S+", rf"\1{SECRET}", plain)
    return hidden if len(hidden) <= 60 else f"{hidden[:57]}..."


def compare(words: list[str], patterns: bool) -> bool | None:
    """The result of a test without gaps; `patterns` is how `[[` compares with an unquoted text."""
    if len(words) == 2:
        return (words[1] == "") == (words[0] == "-z") if words[0] in ("-z", "-n") else None
    left, sign, right = words
    if sign in ("=", "==", "!="):
        equal = fnmatchcase(left, right) if patterns else left == right
        return equal == (sign != "!=")
    if sign in _COMPARISONS and all(re.fullmatch(r"-?\d{1,15}", word) for word in (left, right)):
        return bool(_ARITHMETIC[_COMPARISONS[sign]](int(left), int(right)))
    return None


def brace_range(node: Any) -> list[str] | None:
    """`{1..3}`."""
    ends = re.fullmatch(r"\{(\d{1,4})\.\.(\d{1,4})\}", text(node))
    if not ends or ends[1][:1] == "0" != ends[1]:
        return None
    first, last = int(ends[1]), int(ends[2])
    step = 1 if last >= first else -1
    return [str(number) for number in range(first, last + step, step)]


def errors(node: Any) -> list[int]:
    """Lines that the grammar does not understand."""
    parts = below(node) if node.has_error else ()
    return [line(part) for part in parts if part.type == "ERROR" or part.is_missing]


def assigned(node: Any, functions: dict[str, Any], variables: Iterable[str]) -> Iterator[str]:
    """Names that a node may set, with the functions that it calls."""
    waiting, seen = [node], set()
    while waiting:
        for part in below(waiting.pop()):
            if part.type == "variable_assignment":
                yield re.split(r"[\[+=]", text(part))[0]
            elif part.type == "for_statement":
                yield text(part.child_by_field_name("variable"))
            elif part.type == "compound_statement" and part.children and part.children[0].type == "((":
                yield from assigned_numbers(part)
            elif part.type == "command":
                name, *arguments = text(part).split() or [""]
                if name in SETTERS:
                    yield from [word for word in arguments if NAME.fullmatch(word)]
                if name in ("eval", "source", "."):
                    yield from variables
                if name not in seen and functions.get(name) is not None:
                    seen.add(name)
                    waiting.append(functions[name])


def assigned_numbers(node: Any) -> Iterator[str]:
    """Names that arithmetic sets: `x += 1`, `x++`."""
    for part in below(node):
        operators = {child.type for child in part.children}
        if operators & {"=", "+=", "-=", "*=", "/=", "%=", "++", "--"}:
            yield from [
                text(child) for child in part.named_children if child.type in ("variable_name", "word")
            ]


def only_appends(node: Any, name: str) -> bool:
    """Whether a loop appends to a list and does nothing else with it."""
    sets = [
        part
        for part in below(node)
        if part.type == "variable_assignment"
        and text(part.child_by_field_name("name")).partition("[")[0] == name
    ]
    return bool(sets) and all(text(part).startswith(f"{name}+=(") for part in sets)


def calculate(node: Any, lookup: Callable[[str], str | Unknown], depth: int = 0) -> int | Unknown:
    """The value of an expression of whole numbers and variables."""
    shown = text(node)
    children = [child for child in node.children if child.type not in ("(", ")", "${", "}", "$")]
    if depth > _MOST_DEPTH:
        return Unknown("the arithmetic is too deeply nested")
    if node.type in ("number", "word") and re.fullmatch(r"\d{1,18}", shown):
        return int(shown)
    is_name = node.type == "word" and NAME.fullmatch(shown)
    if is_name or node.type in ("variable_name", "simple_expansion", "expansion"):
        name = shown.strip("${}")
        value = lookup(name) if re.fullmatch(r"\w+", name) else Unknown(f"{shown} is not read")
        if isinstance(value, Unknown):
            return value
        number = re.fullmatch(r"-?\d{1,18}", value)
        return int(value) if number else Unknown(f"{name} is {value!r}, no number")
    if node.type == "parenthesized_expression" and len(children) == 1:
        return calculate(children[0], lookup, depth + 1)
    if node.type == "unary_expression" and len(children) == 2 and children[0].type in ("-", "+", "!"):
        inner = calculate(children[1], lookup, depth + 1)
        if children[0].type == "!" and not isinstance(inner, Unknown):
            return int(inner == 0)
        return inner if isinstance(inner, Unknown) or children[0].type == "+" else -inner
    if node.type == "binary_expression" and len(children) == 3 and children[1].type in _ARITHMETIC:
        left = calculate(children[0], lookup, depth + 1)
        right = calculate(children[2], lookup, depth + 1)
        if isinstance(left, Unknown):
            return left
        if isinstance(right, Unknown):
            return right
        if children[1].type in ("/", "%") and right == 0:
            return Unknown(f"{shown} divides by zero")
        result = int(_ARITHMETIC[children[1].type](left, right))
        return result if abs(result) < _LARGEST else Unknown(f"{shown} is too large")
    return Unknown(f"{shown} is not read")
