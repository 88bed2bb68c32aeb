"""Nodes of a shell script's syntax tree: their text, their lines, tests and arithmetic."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from isotrain.errors import install
from isotrain.tools.imports import literals
from isotrain.tools.imports.source import SECRET, ImportSourceError, Unknown

SETTERS = ("read", "mapfile", "readarray", "getopts", "let", "printf", "wait")
NAME = re.compile(r"[A-Za-z_]\w*")
_LARGEST = 2**63
_BLANK = re.compile(r"[ \t\r\n]")
_BETWEEN = re.compile(r"(?:[ \t\n]|\\\n)*")
_WHOLE = {
    "string",
    "translated_string",
    "concatenation",
    "word",
    "heredoc_body",
    "command_substitution",
    "expansion",
    "arithmetic_expansion",
}
_SEPARATORS = {";", "&", "&&", "|", "||", "(", ")", "\n", ";;", "", "ERROR"}
_MOST_DEPTH = 40
REDIRECTS = ("file_redirect", "heredoc_redirect", "herestring_redirect")
STATEMENTS = (
    "command",
    "pipeline",
    "list",
    "redirected_statement",
    "subshell",
    "compound_statement",
    "negated_command",
)
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
_BINARY = {"=", "==", "!=", "<", ">", "-a", "-o", "-nt", "-ot", "-ef"}
_BINARY |= {f"-{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_COMPARISONS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


def parser() -> Any:
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ModuleNotFoundError:
        raise ImportSourceError(
            f"shell scripts need a parser: {install('import')}; a resolved configuration "
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


def words_in(node: Any) -> Iterator[Any]:
    """The words of a command in one of its parts: behind the file of a redirection may be more."""
    if node.type == "file_redirect":
        yield from node.children_by_field_name("destination")[1:]
    elif node.type == "heredoc_redirect":
        for child in node.named_children:
            if (
                not child.type.startswith("heredoc")
                and child.type != "file_descriptor"
                and child.type not in STATEMENTS
            ):
                yield from words_in(child)
    elif node.type not in ("variable_assignment", "herestring_redirect", "comment"):
        yield node


def bracket_words(node: Any) -> Iterator[Any]:
    """The words between `[` and `]`, whose operators the grammar puts in another order than bash."""
    for child in node.children:
        if child.type in ("binary_expression", "unary_expression", "parenthesized_expression"):
            yield from bracket_words(child)
        elif child.type not in ("[", "]"):
            yield child


def evaluate(words: list[str | None]) -> bool | None:
    """The result of `[ ... ]`, by the number of words as bash decides; None is a word that is not known."""
    if len(words) < 2:
        return None if None in words else bool(words and words[0])
    if len(words) == 3 and words[1] in _BINARY:
        if words[1] in ("-a", "-o"):
            sides = [None if word is None else bool(word) for word in (words[0], words[2])]
            return _either(sides) if words[1] == "-o" else _all(sides)
        known = [word for word in words if word is not None]
        return compare(known, patterns=False) if len(known) == 3 else None
    if words[0] == "!" and (len(words) < 5 or not {"-a", "-o"} & {*words}):
        inner = evaluate(words[1:])
        return None if inner is None else not inner
    if len(words) == 2:
        return None if None in words else compare([str(word) for word in words], patterns=False)
    if None in words or "(" in words:
        return None  # an unknown word may be an operator
    for sign, decide in (("-o", _either), ("-a", _all)):
        if sign in words[1:-1]:
            place = words.index(sign, 1)
            return decide([evaluate(words[:place]), evaluate(words[place + 1 :])])
    return None


def _either(sides: list[bool | None]) -> bool | None:
    return True if True in sides else None if None in sides else False


def _all(sides: list[bool | None]) -> bool | None:
    return False if False in sides else None if None in sides else True


def compare(words: list[str], patterns: bool) -> bool | None:
    """The result of a test without gaps; `patterns` is how `[[` compares with an unquoted text."""
    if len(words) == 2:
        return (words[1] == "") == (words[0] == "-z") if words[0] in ("-z", "-n") else None
    left, sign, right = words
    if sign in ("=", "==", "!="):
        equal = literals.matches(left, right) if patterns else left == right
        if equal is None:
            return None
        return equal == (sign != "!=")
    if sign in _COMPARISONS and all(re.fullmatch(r"-?\d{1,15}", word) for word in (left, right)):
        # `[[` computes its sides: 010 is octal there.
        numbers = [integer(word) if patterns else int(word) for word in (left, right)]
        known = [number for number in numbers if isinstance(number, int)]
        return bool(_ARITHMETIC[_COMPARISONS[sign]](*known)) if len(known) == 2 else None
    return None


def errors(node: Any, source: bytes) -> list[int]:
    """Lines that the grammar does not understand, or reads otherwise than bash.

    Between two tokens are blanks, or a backslash at the end of a line. The grammar passes over all else; and
    it ends a word at such a backslash, where bash goes on with it if no blank follows.
    """
    broken: list[int] = []
    end, last = 0, ""
    for part, above, top in _tokens(node):
        misplaced = part.type == ";;" and above != "case_item"
        misplaced = misplaced or (part.type == "(" and above == "subshell" and top == "command")
        if part.type == "ERROR" or part.is_missing or misplaced:
            broken.append(line(part))
        gap = source[end : part.start_byte].decode("utf-8", "replace")
        joined = "\\\n" in gap and not _BLANK.search(gap.replace("\\\n", "")) and last not in _SEPARATORS
        if not _BETWEEN.fullmatch(gap) or (joined and part.type not in _SEPARATORS):
            broken.append(line(part) - gap.count("\n"))
        end, last = max(end, part.end_byte), part.type
    return broken


def _tokens(node: Any) -> Iterator[tuple[Any, str, str]]:
    """Errors and tokens in order, each with the types of the two nodes above; a word is one token."""
    waiting = [(node, "", "")]
    while waiting:
        part, above, top = waiting.pop()
        inside = part.children if part.type not in _WHOLE or part.has_error else []
        if not inside or part.type == "ERROR":
            yield part, above, top
        waiting += [(child, part.type, above) for child in reversed(inside)]


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


def integer(text: str) -> int | Unknown:
    """A number of the shell: 010 is octal, 0x10 hexadecimal."""
    number = re.fullmatch(r"\s*(-?)(?:(0x[0-9a-fA-F]{1,15})|(0[0-7]{0,18})|([1-9]\d{0,17}))\s*", text)
    if not number:
        return Unknown(f"{text[:40]!r} is no number")
    sign, hexadecimal, octal, decimal = number.groups()
    value = int(hexadecimal, 16) if hexadecimal else int(octal, 8) if octal else int(decimal)
    return -value if sign else value


def calculate(node: Any, lookup: Callable[[str], str | Unknown], depth: int = 0) -> int | Unknown:
    """The value of an expression of whole numbers and variables."""
    shown = text(node)
    children = [child for child in node.children if child.type not in ("(", ")", "${", "}", "$")]
    if depth > _MOST_DEPTH:
        return Unknown("the arithmetic is too deeply nested")
    if shown[:1].isdigit() and node.type in ("number", "word", "variable_name"):
        return integer(shown)
    is_name = node.type == "word" and NAME.fullmatch(shown)
    if is_name or node.type in ("variable_name", "simple_expansion", "expansion"):
        name = shown.strip("${}")
        value = lookup(name) if re.fullmatch(r"\w+", name) else Unknown(f"{shown} is not read")
        if isinstance(value, Unknown):
            return value
        return integer(value)
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
