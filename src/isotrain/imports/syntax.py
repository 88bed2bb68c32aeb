"""Nodes of a shell script's syntax tree: their text, their lines, simple tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from isotrain.imports.source import SECRET, ImportSourceError


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
        found = waiting.pop()
        yield found
        waiting += reversed(found.named_children)


def text(node: Any) -> str:
    return str(node.text.decode("utf-8", "replace")) if node is not None else ""


def line(node: Any) -> int:
    return int(node.start_point[0]) + 1


def short(node: Any) -> str:
    """The text of a node for messages: one line, without what follows the name of a secret."""
    plain = " ".join(text(node).split())
    hidden = re.sub(r"(?i)((?:key|token|secret|password)\w*[=\s]+)\S+", rf"\1{SECRET}", plain)
    return hidden if len(hidden) <= 60 else f"{hidden[:57]}..."


def flat(node: Any) -> Iterator[Any]:
    """The parts of a test without the nesting that the grammar gives them."""
    if node.type in ("binary_expression", "unary_expression"):
        for child in node.children:
            yield from flat(child) if child.type == "unary_expression" else [child]
    else:
        yield node


def compare(words: list[str]) -> bool | None:
    numbers = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) != 3:
        return None
    left, operator, right = words
    if operator in ("=", "=="):
        return fnmatchcase(left, right)
    if operator == "!=":
        return not fnmatchcase(left, right)
    if operator in numbers and all(re.fullmatch(r"-?\d{1,15}", word) for word in (left, right)):
        a, b = int(left), int(right)
        return {"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[
            numbers[operator]
        ]
    return None
