"""Nodes of a shell script's syntax tree: their text, their lines, simple tests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
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
    numbers = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
    if len(words) == 2:
        return (words[1] == "") == (words[0] == "-z") if words[0] in ("-z", "-n") else None
    left, operator, right = words
    if operator in ("=", "==", "!="):
        equal = fnmatchcase(left, right) if patterns else left == right
        return equal == (operator != "!=")
    if operator in numbers and all(re.fullmatch(r"-?\d{1,15}", word) for word in (left, right)):
        a, b = int(left), int(right)
        return {"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[
            numbers[operator]
        ]
    return None


def brace_range(node: Any) -> list[str] | None:
    """`{1..3}`."""
    found = re.fullmatch(r"\{(\d{1,4})\.\.(\d{1,4})\}", text(node))
    if not found or found[1][:1] == "0" != found[1]:
        return None
    first, last = int(found[1]), int(found[2])
    step = 1 if last >= first else -1
    return [str(number) for number in range(first, last + step, step)]


def errors(node: Any) -> list[int]:
    """Lines that the grammar does not understand."""
    return (
        [line(part) for part in below(node) if part.type == "ERROR" or part.is_missing]
        if node.has_error
        else []
    )


SETTERS = ("read", "mapfile", "readarray", "getopts", "let", "printf", "wait")
NAME = re.compile(r"[A-Za-z_]\w*")


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
