"""The commands of a shell script with their words expanded, read from its syntax tree and never run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from isotrain.imports import syntax
from isotrain.imports.arithmetic import calculate
from isotrain.imports.source import SECRET, ImportSourceError, Unknown, holds_secret

LONGEST_SCRIPT = 1024 * 1024
MOST_STEPS = 200_000
MOST_DEPTH = 60
LONGEST_WORD = 100_000
MOST_WORDS = 10_000
HOME = "~"
_LOOPS = ("for_statement", "c_style_for_statement", "while_statement")
_BRANCHES = ("elif_clause", "else_clause")


# Between two of these characters is the number of the reason why a part of a word is unknown.
_GAP = "\ue000"
_GAPS = re.compile(f"{_GAP}(\\d+){_GAP}")

Value = str | list[str]


@dataclass(frozen=True)
class Command:
    """`lines` has the line of each word, counted from 1; a word that is not known is `Unknown`."""

    words: tuple[str | Unknown, ...]
    lines: tuple[int, ...]
    certain: bool


@dataclass
class Shell:
    """Walks a script from its first line to its last and keeps what the variables hold."""

    commands: list[Command] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    variables: dict[str, Value] = field(default_factory=dict)
    functions: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    depth: int = 0
    reasons: list[str] = field(default_factory=list)
    unsure: int = 0

    def walk(self, node: Any) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS or self.depth > MOST_DEPTH:
            raise ImportSourceError("the script is too long or too deeply nested to be read")
        self.depth += 1
        try:
            _STATEMENTS.get(node.type, Shell._children)(self, node)
        finally:
            self.depth -= 1

    def _children(self, node: Any) -> None:
        for child in node.named_children:
            self.walk(child)

    def _nothing(self, node: Any) -> None:
        pass

    # Statements

    def _assignment(self, node: Any) -> None:
        name = syntax.text(node.child_by_field_name("name"))
        value_node = node.child_by_field_name("value")
        appends = any(child.type == "+=" for child in node.children)
        value: Value
        if node.child_by_field_name("name").type == "subscript":
            self.variables[name.partition("[")[0]] = self.gap(f"line {syntax.line(node)} sets a part of it")
            return
        if value_node is None:
            value = ""
        elif value_node.type == "array":
            value = self.few([word for item in value_node.named_children for word in self.words(item)])
        else:
            value = self.joined(value_node)
            if holds_secret(name, value):
                value = SECRET
        before = self.variables.get(name, "")
        if appends and isinstance(before, list):
            value = self.few([*before, *(value if isinstance(value, list) else [value])])
        elif appends and isinstance(value, str) and isinstance(before, str):
            value = self.bounded(before + value)
        if self.unsure and name not in self.variables:
            self.remarks.append(
                f"line {syntax.line(node)} sets {name} if a condition holds: taken as if it did"
            )
        elif self.unsure and self.variables[name] != value:
            value = self.gap(f"line {syntax.line(node)} sets it under a condition that is not known")
        self.variables[name] = value

    def _command(self, node: Any) -> None:
        words: list[str] = []
        lines: list[int] = []
        for child in node.named_children:
            if child.type in ("variable_assignment", "file_redirect", "herestring_redirect"):
                continue
            found = self.words(child)
            words += found
            lines += [syntax.line(child)] * len(found)
        if not words:
            return
        name = words[0]
        if name in ("source", ".") and len(words) > 1:
            file = words[1] if not _GAPS.search(words[1]) else "a file"
            self.remarks.append(f"line {lines[0]}: {file} is sourced; it was not read")
        elif name in self.functions and self.depth < MOST_DEPTH - 10:
            self._call(name, words[1:])
        else:
            known = tuple(self.known(word) for word in words)
            self.commands.append(Command(known, tuple(lines), not self.unsure))

    def _call(self, name: str, arguments: list[str]) -> None:
        outer = {key: value for key, value in self.variables.items() if key.isdigit() or key == "@"}
        for key in outer:
            del self.variables[key]
        self.variables.update({str(place): word for place, word in enumerate(arguments, start=1)})
        self.variables["@"] = arguments
        body = self.functions.pop(name)  # a function that calls itself is not followed
        try:
            self.walk(body)
        finally:
            self.functions[name] = body
            for key in [key for key in self.variables if key.isdigit() or key == "@"]:
                del self.variables[key]
            self.variables.update(outer)

    def _function(self, node: Any) -> None:
        body = node.child_by_field_name("body")
        if body is not None:
            self.functions[syntax.text(node.child_by_field_name("name"))] = body

    def _redirected(self, node: Any) -> None:
        """`read -r -d '' name <<EOF` puts a text into a variable; other redirections change no word."""
        bodies = [
            body
            for redirect in node.named_children
            if redirect.type == "heredoc_redirect"
            for body in redirect.named_children
            if body.type == "heredoc_body"
        ]
        quoted = any(
            syntax.text(start)[:1] in "'\"\\"
            for redirect in node.named_children
            if redirect.type == "heredoc_redirect"
            for start in redirect.named_children
            if start.type == "heredoc_start"
        )
        before = len(self.commands)
        self._children(node)
        if bodies and len(self.commands) > before and self.commands[-1].words[0] == "read":
            words = [word for word in self.commands[-1].words[1:] if isinstance(word, str)]
            names = [word for word in words if re.fullmatch(r"[A-Za-z_]\w*", word)]
            if names:
                text = syntax.text(bodies[0]) if quoted else self._heredoc(bodies[0])
                self.variables[names[-1]] = text.strip()

    def _heredoc(self, body: Any) -> str:
        """Expanded like a string in double quotes; the grammar does not see all expansions in it."""
        before = "\n" * body.start_point[0]
        text = syntax.text(body).replace('"', '\\"')
        tree = syntax.parser().parse(f'{before}x="{text}"'.encode())
        strings = [node for node in syntax.below(tree.root_node) if node.type == "string"]
        return (
            self.joined(strings[0])
            if strings
            else self.gap(f"line {syntax.line(body)} has a text that is not read")
        )

    def _case(self, node: Any) -> None:
        subject_node = node.child_by_field_name("value")
        subject = self.joined(subject_node) if subject_node is not None else ""
        items = [child for child in node.named_children if child.type == "case_item"]
        if _GAPS.search(subject):
            for item in items:
                self._maybe(item)
            return
        for item in items:
            patterns = [syntax.text(child) for child in item.children_by_field_name("value")]
            if any(fnmatchcase(subject, pattern.strip("'\"")) for pattern in patterns):
                self._body(item, skip=len(patterns))
                return

    def _if(self, node: Any) -> None:
        conditions = node.children_by_field_name("condition")
        truth = self.test(conditions[0]) if conditions else None
        branches = [child for child in node.named_children if child.type in _BRANCHES]
        body = [c for c in node.named_children if c not in conditions and c.type not in _BRANCHES]
        if truth is not False:
            for child in body:
                self.walk(child) if truth else self._maybe(child)
        if truth is True:
            return
        if truth is None:
            for branch in branches:
                self._maybe(branch)
        elif branches:
            self._elif(branches)

    def _elif(self, branches: list[Any]) -> None:
        """The branches after a condition that is false."""
        for place, branch in enumerate(branches):
            if branch.type == "else_clause":
                self._children(branch)
                return
            parts = branch.named_children
            truth = self.test(parts[0]) if parts else None
            if truth is None:
                for other in branches[place:]:
                    self._maybe(other)
                return
            if truth:
                for child in parts[1:]:
                    self.walk(child)
                return

    def _list(self, node: Any) -> None:
        """`a && b`: the second is certain only if the first is a test that is true."""
        parts = node.named_children
        operator = next((child.type for child in node.children if child.type in ("&&", "||")), "")
        truth = self.test(parts[0]) if parts and parts[0].type == "test_command" else True
        self.walk(parts[0])
        for part in parts[1:]:
            if truth is None:
                self._maybe(part)
            elif truth == (operator == "&&") or parts[0].type != "test_command":
                self.walk(part)

    def _loop(self, node: Any) -> None:
        variable = node.child_by_field_name("variable")
        if variable is not None:
            self.variables[syntax.text(variable)] = self.gap(
                f"it changes in the loop of line {syntax.line(node)}"
            )
        self._maybe(node)

    def _body(self, item: Any, skip: int) -> None:
        for child in item.named_children[skip:]:
            self.walk(child)

    def _maybe(self, node: Any) -> None:
        self.unsure += 1
        try:
            self._children(node) if node.type in (*_BRANCHES, "case_item", *_LOOPS) else self.walk(node)
        finally:
            self.unsure -= 1

    def test(self, node: Any) -> bool | None:
        """Whether a simple `[ ... ]` is true; None if that is not known."""
        inner = list(node.named_children)
        if node.type != "test_command" or len(inner) != 1:
            return None
        words = [
            self.joined(child) if child.is_named else syntax.text(child) for child in syntax.flat(inner[0])
        ]
        return None if any(_GAPS.search(word) for word in words) else syntax.compare(words)

    # Words

    def gap(self, why: str) -> str:
        """A part of a word that only running the script would tell."""
        self.reasons.append(why)
        return f"{_GAP}{len(self.reasons) - 1}{_GAP}"

    def known(self, word: str) -> str | Unknown:
        found = _GAPS.search(word)
        if not found:
            return word
        return Unknown(self.reasons[int(found[1])], _GAPS.sub("?", word))

    def bounded(self, word: str) -> str:
        if len(word) > LONGEST_WORD:
            raise ImportSourceError(f"a word of the script is longer than {LONGEST_WORD} characters")
        return word

    def few(self, words: list[str]) -> list[str]:
        if len(words) > MOST_WORDS:
            raise ImportSourceError(f"a list of the script has more than {MOST_WORDS} words: it is too long")
        return words

    def words(self, node: Any) -> list[str]:
        """The words that one node becomes: a list expands to several, an unquoted text is split."""
        if node.type == "command_name":
            return [word for child in node.named_children for word in self.words(child)]
        if node.type in ("simple_expansion", "expansion"):
            value = self.expand(node)
            return value if isinstance(value, list) else value.split()
        if node.type == "string":
            inner = node.named_children
            if len(inner) == 1 and inner[0].type in ("simple_expansion", "expansion"):
                value = self.expand(inner[0])
                if isinstance(value, list) and len(syntax.text(node)) == len(syntax.text(inner[0])) + 2:
                    return value
        return [self.joined(node)]

    def joined(self, node: Any) -> str:
        """The text of one node, as one word."""
        self.steps += 1
        if self.steps > MOST_STEPS or self.depth > MOST_DEPTH:
            raise ImportSourceError("the script is too long or too deeply nested to be read")
        self.depth += 1
        try:
            return self.bounded(_WORDS.get(node.type, Shell._plain)(self, node))
        finally:
            self.depth -= 1

    def _plain(self, node: Any) -> str:
        if node.named_child_count and node.type not in ("word", "extglob_pattern", "regex"):
            return self._between(node)
        return re.sub(r"\\(.)", r"\1", syntax.text(node).replace("\\\n", ""))

    def _raw(self, node: Any) -> str:
        return syntax.text(node)[1:-1]

    def _ansi(self, node: Any) -> str:
        return syntax.text(node)[2:-1].replace("\\n", "\n").replace("\\t", "\t").replace("\\'", "'")

    def _string(self, node: Any) -> str:
        return self._between(node, quoted=True)

    def _between(self, node: Any, quoted: bool = False) -> str:
        """The expansions inside a node, and the text between them as it is."""
        source: bytes = node.text
        start, word = (1 if quoted else 0), ""
        end = len(source) - (1 if quoted else 0)
        for child in node.named_children:
            if child.type == "string_content":
                continue
            first = child.start_byte - node.start_byte
            word += self._literal(source[start:first], quoted) + self.joined(child)
            start = child.end_byte - node.start_byte
        return word + self._literal(source[start:end], quoted)

    @staticmethod
    def _literal(source: bytes, quoted: bool) -> str:
        text = source.decode("utf-8", "replace").replace("\\\n", "")
        return re.sub(r'\\([$`"\\])' if quoted else r"\\(.)", r"\1", text)

    def _expansion(self, node: Any) -> str:
        value = self.expand(node)
        return value if isinstance(value, str) else " ".join(value)

    def _substitution(self, node: Any) -> str:
        text = syntax.text(node)
        if re.fullmatch(r"\$\(\s*pwd\s*\)|`pwd`", text):
            return "."
        if re.fullmatch(r"\$\(\([^$`]*\)\)", text) and (again := syntax.arithmetic(text)) is not None:
            return self.joined(again)  # in some places the grammar takes arithmetic for a command
        return self.gap(f"line {syntax.line(node)} runs a command for it: {syntax.short(node)}")

    def _arithmetic(self, node: Any) -> str:
        inner = node.named_children
        if len(inner) != 1:
            return self.gap(f"line {syntax.line(node)} computes it: {syntax.short(node)}")
        result = calculate(inner[0], lambda name: self.joined_variable(name, node))
        return self.gap(result.why) if isinstance(result, Unknown) else str(result)

    def joined_variable(self, name: str, node: Any) -> str | Unknown:
        value = self.lookup(name, node)
        return self.known(value) if isinstance(value, str) else Unknown(f"{name} is a list")

    def lookup(self, name: str, node: Any) -> Value:
        if name in ("@", "*"):
            return self.variables.get("@", [])
        if name in self.variables:
            return self.variables[name]
        if name in ("HOME", "PWD"):
            return HOME if name == "HOME" else "."
        place = "command line" if name.isdigit() else "environment"
        return self.gap(f"line {syntax.line(node)} takes it from the {place} (${name})")

    def expand(self, node: Any) -> Value:
        """`$x`, `${x}`, `${x[@]}` and `${x:-default}`; other forms are unknown."""
        children = [child for child in node.children if child.type not in ("$", "${", "}")]
        if not children or children[0].type not in ("variable_name", "special_variable_name", "subscript"):
            return self.gap(f"line {syntax.line(node)} computes it: {syntax.short(node)}")
        head, rest = children[0], children[1:]
        if head.type == "subscript":
            name, _, index = syntax.text(head).partition("[")
            value = self.lookup(name, node)
            whole = index.rstrip("]").strip("\"'") in ("@", "*")
            if not (whole and isinstance(value, list)) or rest:
                return self.gap(f"line {syntax.line(node)} takes it from a list: {syntax.short(node)}")
            return value
        name = syntax.text(head)
        known = self.variables.get(name)
        value = self.lookup(name, node)
        if isinstance(value, list) and name not in ("@", "*"):
            value = value[0] if value else ""
        if not rest:
            return value
        operator = rest[0].type
        other = ""
        for child in rest[1:]:
            other += self.joined(child)
        empty = known in (None, "")
        if operator in (":-", ":=") or (operator in ("-", "=") and known is None):
            if empty and operator in (":=", "="):
                self.variables[name] = other
            return other if empty else value
        if operator in ("-", "="):
            return value
        if operator in (":?", "?") and not empty:
            return value
        if operator in (":+", "+"):
            return "" if empty else other
        return self.gap(f"line {syntax.line(node)} computes it: {syntax.short(node)}")


_STATEMENTS: dict[str, Callable[[Shell, Any], None]] = {
    "variable_assignment": Shell._assignment,
    "command": Shell._command,
    "function_definition": Shell._function,
    "redirected_statement": Shell._redirected,
    "case_statement": Shell._case,
    "if_statement": Shell._if,
    "list": Shell._list,
    "test_command": Shell._nothing,
    "comment": Shell._nothing,
    "heredoc_redirect": Shell._nothing,
    "file_redirect": Shell._nothing,
    "herestring_redirect": Shell._nothing,
    "command_substitution": Shell._nothing,
    **dict.fromkeys(_LOOPS, Shell._loop),
}
_WORDS: dict[str, Callable[[Shell, Any], str]] = {
    "raw_string": Shell._raw,
    "ansi_c_string": Shell._ansi,
    "string": Shell._string,
    "simple_expansion": Shell._expansion,
    "expansion": Shell._expansion,
    "command_substitution": Shell._substitution,
    "process_substitution": Shell._substitution,
    "arithmetic_expansion": Shell._arithmetic,
}


def read_script(text: str) -> Shell:
    """All commands of a script; nothing of it is run."""
    data = text.replace(_GAP, "").encode("utf-8", "replace")
    if len(data) > LONGEST_SCRIPT:
        raise ImportSourceError(f"longer than {LONGEST_SCRIPT // 1024} KiB; is this a shell script?")
    shell = Shell()
    try:
        shell.walk(syntax.parser().parse(data).root_node)
    except RecursionError:
        raise ImportSourceError("the script is too deeply nested to be read") from None
    return shell
