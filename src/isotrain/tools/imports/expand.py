"""Words of a shell script with their variables expanded as bash would, as far as the text tells.

A part of a word that only running the script would tell is a *gap*: its number stands in the text between two
marks, so that it survives joining, splitting and appending. A word of a list that is there under a condition
only begins with the number of that condition, between two other marks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from isotrain.tools.imports import literals, syntax
from isotrain.tools.imports.literals import GAP, GAPS, MARKS, MAYBE, MAYBES, loose, uncertain
from isotrain.tools.imports.source import SECRET, ImportSourceError, ScriptCondition, Unknown

MOST_STEPS = 200_000
MOST_DEPTH = 60
LONGEST_WORD = 100_000
MOST_WORDS = 10_000
_LONGEST_COMPARED = 1000
HOME = "~"
_BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")

Value = str | list[str]


@dataclass(frozen=True)
class Alternative:
    """The text behind `${x:-`, which has quotes of its own; `--set` of `name` stands in its place."""

    nodes: list[Any]
    name: str = ""


@dataclass
class Reason:
    """Why a part is unknown. `names` are the variables that `--set` can give, nearest to the cause first."""

    why: str
    names: list[str] = field(default_factory=list)
    options: tuple[tuple[int, str], ...] = ()
    conditions: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Label:
    """When a word is there: the text for messages, and the conditions it depends on."""

    text: str
    conditions: frozenset[int]


@dataclass
class ScriptState:
    """Variables, functions and conditions of a script up to a node, and the words that its nodes become."""

    variables: dict[str, Value] = field(default_factory=dict)
    pinned: dict[str, str] = field(default_factory=dict)
    pins_used: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    conditions: list[ScriptCondition] = field(default_factory=list)
    functions: dict[str, Any] = field(default_factory=dict)
    # Labels of the branches that are being walked.
    under: list[int] = field(default_factory=list)
    # States in which functions may have returned, with their conditions.
    returned: list[list[tuple[int, dict[str, Value]]]] = field(default_factory=list)
    # Why variables that the script does not set may have a value all the same.
    others_set: str = ""
    # Whether `shopt` changed what becomes of patterns that no file matches.
    glob_options: bool = False
    testing: bool = False
    steps: int = 0
    depth: int = 0

    def walk(self, node: Any) -> None:
        """Follow one statement."""
        raise NotImplementedError

    def walk_all(self, nodes: list[Any]) -> None:
        for node in nodes:
            self.walk(node)

    # Gaps

    def gap(self, why: str, *names: str, options: tuple[tuple[int, str], ...] = ()) -> str:
        """A part of a word that only running the script would tell."""
        depends = [label for label, _ in options]
        inner = [text for _, text in options]
        conditions = self.depends_on(*inner).union(*(self.labels[label].conditions for label in depends))
        self.reasons.append(Reason(why, list(names), options, conditions))
        return f"{GAP}{len(self.reasons) - 1}{GAP}"

    def gap_at(self, node: Any, what: str, *names: str) -> str:
        return self.gap(f"line {syntax.line(node)} {what}", *names)

    def note(self, node: Any, text: str) -> None:
        note = f"line {syntax.line(node)} {text}"
        if note not in self.notes:
            self.notes.append(note)

    def depends_on(self, *texts: str) -> frozenset[int]:
        """The conditions that texts depend on."""
        of_gaps = [self.reasons[int(number)].conditions for text in texts for number in GAPS.findall(text)]
        of_words = [self.labels[int(number)].conditions for text in texts for number in MAYBES.findall(text)]
        return frozenset[int]().union(*of_gaps, *of_words)

    def named(self, value: Value, name: str) -> None:
        """`--set` of `name` fills the gaps in its value."""
        for text in value if isinstance(value, list) else [value]:
            for number in GAPS.findall(text):
                if name not in (names := self.reasons[int(number)].names):
                    names.append(name)

    def label(self, text: str, *conditions: int) -> int:
        self.labels.append(Label(text, frozenset(conditions)))
        return len(self.labels) - 1

    def maybe(self, word: str, label: int) -> str:
        """The word of a list, there under a condition only; it may be under another one already."""
        inner = MAYBES.match(word)
        if inner:
            first, second = self.labels[int(inner[1])], self.labels[label]
            label = self.label(f"{first.text} and {second.text}", *first.conditions, *second.conditions)
            word = word[inner.end() :]
        return f"{MAYBE}{label}{MAYBE}{word}"

    def known(self, word: str) -> tuple[str | Unknown, str]:
        """A word for its reader, and the condition under which it is there ("" if it always is)."""
        when = ""
        if label := MAYBES.match(word):
            when, word = self.labels[int(label[1])].text, word[label.end() :]
        gap = GAPS.search(word)
        if not gap:
            return word, when
        reason = self.reasons[int(gap[1])]
        hint = f" (--set {reason.names[0]}=VALUE gives it)" if reason.names else ""
        return Unknown(reason.why + hint, GAPS.sub("?", word), word[: gap.start()]), when

    def plain(self, text: str) -> str:
        """Text for messages."""
        return GAPS.sub("?", MAYBES.sub("", text))

    # Words

    def words(self, node: Any) -> list[str]:
        """The words that one node becomes: a list expands to several, an unquoted text is split."""
        if node.type == "command_name":
            return [word for child in node.named_children for word in self.words(child)]
        if (
            node.type == "brace_expression"
            and (numbers := literals.brace_range(syntax.text(node))) is not None
        ):
            return self.few(numbers)
        result, stays, literal = [""], False, ""  # `stays`: quotes around nothing are an empty word
        pieces = [*self.pieces(node)]
        before = ""
        for piece, quoted, splits in pieces:
            stays = stays or quoted
            texts = piece if isinstance(piece, list) else [piece]
            if not quoted and any(self._is_glob(before, text) for text in texts):
                return [self.gap_at(node, f"takes the files that match it: {syntax.short(node)}")]
            before += texts[-1] if texts else ""
            literal += piece if not quoted and not splits and isinstance(piece, str) else "x"
            if isinstance(piece, list):
                parts = [part for word in piece for part in (self.split(word) if splits else [word])]
                edges = ("", "")
            elif splits:
                parts = self.split(piece, alone=len(pieces) == 1)
                edges = (piece[:1], piece[-1:])
            else:
                result[-1] += piece
                continue
            self._add(result, parts, edges)
        stays = stays and not any(piece == [] for piece, _, _ in pieces)
        kept = [word for word in result if word or (stays and len(result) == 1)]
        if _BRACES.search(literal):
            return [self.gap_at(node, f"has braces that bash expands: {syntax.short(node)}")]
        return self.few([self.bounded(word) for word in kept])

    def _is_glob(self, before: str, text: str) -> bool:
        """Whether files may stand in the place of a word; no file is called `key=...`."""
        text = text.replace(SECRET, "")
        if self.glob_options:
            return bool(re.search(r"[*?\[]", text))
        place = re.search(r"[*?]", text)
        return place is not None and "=" not in before + text[: place.start()]

    @staticmethod
    def _add(result: list[str], parts: list[str], edges: tuple[str, str]) -> None:
        """Append the words of an expansion; a blank at its edge ends the word that it touches."""
        blanks = (" ", "\t", "\n")
        if not parts:
            if edges[0] in blanks and result[-1]:
                result.append("")
            return
        if (edges[0] in blanks or MAYBE in parts[0]) and result[-1]:
            result.append("")
        result[-1] += parts[0]
        result += parts[1:]
        if edges[1] in blanks or MAYBE in result[-1]:
            result.append("")

    def split(self, text: str, alone: bool = False) -> list[str]:
        """An unquoted text as words.

        A gap that stands alone and has a known text in each branch is the words of all branches.
        """
        if "IFS" in self.variables and self.variables["IFS"] != " \t\n" and text:
            return [self.gap("IFS is set, so that words end elsewhere")]
        words: list[str] = []
        for word in re.findall(r"[^ \t\n]+", text):
            gap = GAPS.fullmatch(word)
            options = self.reasons[int(gap[1])].options if gap else ()
            if alone and options and not any(GAPS.search(option) for _, option in options):
                words += [self.maybe(part, label) for label, option in options for part in option.split()]
            else:
                words.append(word)
        return words

    def joined(self, node: Any) -> str:
        """The text of one node, as one word."""
        pieces = [piece for piece, _, _ in self.pieces(node)]
        return self.bounded(
            "".join(self.one_word(piece, node) if isinstance(piece, list) else piece for piece in pieces)
        )

    def pattern(self, node: Any) -> str:
        """The text of one node as a pattern: characters in quotes stand for themselves."""
        texts = [(self.one_word(piece, node) if isinstance(piece, list) else piece, quoted)
                 for piece, quoted, _ in self.pieces(node)]  # fmt: skip
        return self.bounded(
            "".join(literals.literal_pattern(text) if quoted else text for text, quoted in texts)
        )

    def one_word(self, words: list[str], node: Any) -> str:
        """A list as one word."""
        if any(MAYBE in word for word in words):
            names = [name for number in self.depends_on(*words) for name in self.conditions[number].names]
            return self.gap_at(node, f"joins words that depend on a condition: {syntax.short(node)}", *names)
        separator = self.variables.get("IFS", " ")
        return (separator[:1] if isinstance(separator, str) else " ").join(words)

    def pieces(
        self, node: Any, quoted: bool = False, splits: bool = False
    ) -> Iterator[tuple[Value, bool, bool]]:
        """Parts of a word in order: the value, whether it is quoted, and whether blanks end words in it.

        `splits` says whether blanks of plain text end words too: they do behind `${x:-`.
        """
        self.steps += 1
        if self.steps > MOST_STEPS or self.depth > MOST_DEPTH:
            raise ImportSourceError("the script is too long or too deeply nested to be read")
        self.depth += 1
        try:
            if node.type == "raw_string":  # in double quotes, as in "${x:-'a'}", it is text
                yield syntax.text(node)[0 if quoted else 1 : None if quoted else -1], True, False
            elif node.type == "ansi_c_string":
                yield self._ansi(node), True, False
            elif node.type in ("string", "translated_string"):
                yield "", True, False
                string = node if node.type == "string" else node.named_children[0]
                yield from self._between(string, quoted=True)
            elif node.type in _EXPANSIONS:
                value = _EXPANSIONS[node.type](self, node)
                if isinstance(value, Alternative):
                    for part in value.nodes:
                        for piece in self.pieces(part, quoted, splits=True):
                            if value.name:
                                self.named(piece[0], value.name)
                            yield piece
                    return
                star = syntax.text(node) == "$*" or "[*]" in syntax.text(node)
                if quoted and star and isinstance(value, list):
                    value = self.one_word(value, node)
                yield value, quoted, not quoted
            elif node.named_child_count and node.type not in ("word", "extglob_pattern", "regex"):
                yield from self._between(node, quoted, splits)
            else:
                yield from literals.literal(node.text, quoted, splits)
        finally:
            self.depth -= 1

    def _between(self, node: Any, quoted: bool, splits: bool = False) -> Iterator[tuple[Value, bool, bool]]:
        """The expansions inside a node, and the text between them as it is."""
        source: bytes = node.text
        in_quotes = node.type == "string"
        start, end = (1, len(source) - 1) if in_quotes else (0, len(source))
        for child in node.named_children:
            if child.type == "string_content":
                continue
            first = child.start_byte - node.start_byte
            if first > start:
                yield from literals.literal(source[start:first], quoted, splits)
            yield from self.pieces(child, quoted, splits)
            start = child.end_byte - node.start_byte
        if end > start:
            yield from literals.literal(source[start:end], quoted, splits)

    def bounded(self, word: str) -> str:
        if len(word) > LONGEST_WORD:
            raise ImportSourceError(f"a word of the script is longer than {LONGEST_WORD} characters")
        return word

    def few(self, words: list[str]) -> list[str]:
        if len(words) > MOST_WORDS:
            raise ImportSourceError(f"a list of the script has more than {MOST_WORDS} words: it is too long")
        return words

    # Expansions

    def _ansi(self, node: Any) -> str:
        text = literals.ANSI_ESCAPES.sub(literals.ansi_escape, syntax.text(node)[2:-1])
        unreadable = "\ufffd" in text or MARKS.search(text)
        return self.gap_at(node, f"has bytes that are no text: {syntax.short(node)}") if unreadable else text

    def _substitution(self, node: Any) -> str:
        text = syntax.text(node)
        if re.fullmatch(r"\$\(\s*pwd\s*\)|`pwd`", text):
            return "."
        if re.fullmatch(r"\$\(\([^$`]*\)\)", text) and (again := syntax.arithmetic(text)) is not None:
            return self.joined(again)  # in some places the grammar takes arithmetic for a command
        return self.gap_at(node, f"runs a command for it: {syntax.short(node)}")

    def _arithmetic(self, node: Any) -> str:
        inner = node.named_children
        if len(inner) != 1:
            return self.gap_at(node, f"computes it: {syntax.short(node)}")
        result = syntax.calculate(inner[0], lambda name: self.number(name, node))
        if not isinstance(result, Unknown):
            return str(result)
        return result.text if GAPS.fullmatch(result.text) else self.gap(result.why)

    def number(self, name: str, node: Any) -> str | Unknown:
        """A variable for arithmetic; a gap keeps its reason."""
        value = self.lookup(name, node)
        if isinstance(value, list):
            value = value[0] if value and MAYBE not in value[0] else self.gap(f"{name} is a list", name)
        gap = GAPS.search(value)
        return Unknown(self.reasons[int(gap[1])].why, gap[0]) if gap else value

    def lookup(self, name: str, node: Any) -> Value:
        """The value of a variable."""
        if name in self.pinned:
            self.pins_used.add(name)
            return self.pinned[name]
        if name in ("@", "*", "#"):
            return self._arguments(name, node)
        if name in self.variables:
            self.named(self.variables[name], name)
            return self.variables[name]
        if name in ("HOME", "PWD"):
            return HOME if name == "HOME" else "."
        if name.isdigit() and self.testing:
            self.note(node, f"asks for the script's own argument ${name}: taken as none")
            return ""
        if self.others_set and not name.isdigit():
            return self.gap(self.others_set, name)
        place = "command line" if name.isdigit() else "environment"
        return self.gap_at(node, f"takes it from the {place} (${name})", name)

    def _arguments(self, name: str, node: Any) -> Value:
        """`$@`, `$*` and `$#`: of the function, or of the script, which is taken as run without any."""
        given = self.variables.get("@")
        if given is None:
            numbers = [str(place) for place in range(1, 1 + sum(key.isdigit() for key in self.pinned))]
            given = [self.pinned[place] for place in numbers if place in self.pinned]
            self.pins_used.update(numbers)
            if not given and name != "#":
                self.note(node, f"passes on the script's own arguments (${name}): taken as none")
        if name != "#" or isinstance(given, str):
            return given
        if "@" not in self.variables and not given:
            return self.gap_at(node, "counts the script's own arguments ($#)", "1")
        return self.gap_at(node, "counts words") if uncertain(given) else str(len(given))

    def expand(self, node: Any) -> Value | Alternative:
        """`$x` and the forms of `${x...}`; what is not understood is unknown."""
        computes = f"line {syntax.line(node)} computes it: {syntax.short(node)}"
        children = [child for child in node.children if child.type not in ("$", "${", "}")]
        counts = len(children) > 1 and children[0].type == "#"
        head, *rest = children[1:] if counts else children or [None]
        if head is None or head.type not in ("variable_name", "special_variable_name", "subscript"):
            return self.gap(computes)
        name, _, index = syntax.text(head).partition("[")
        index = index.rstrip("]").strip("\"'") if head.type == "subscript" else ""
        is_set = name in self.variables or name in self.pinned or name in ("@", "*")
        value = self.lookup(name, node)
        if index:
            value = self._item(value, index, name, node)
            is_set = is_set and value != [] and (index in ("@", "*") or self._has_item(name, index))
        elif isinstance(value, list) and name not in ("@", "*"):
            is_set = is_set and value != []
            value = (value[0] if value else "") if not uncertain(value) else self.gap(computes, name)
        if not is_set and rest and rest[0].type in _DEFAULTS and self.others_set:
            return value
        if counts:
            return self._count(value, computes, name) if not rest else self.gap(computes)
        if not rest:
            return value
        if rest[0].type in _DEFAULTS:
            return self._default(name, is_set, value, rest, node)
        return self._computed(value, rest, computes, name)

    def _item(self, value: Value, index: str, name: str, node: Any) -> Value:
        if index in ("@", "*"):
            if isinstance(value, list):
                return value
            if name in self.pinned:
                return shlex.split(value)
            return [value] if name in self.variables or MARKS.search(value) else []
        words = value if isinstance(value, list) else [value]
        if not re.fullmatch(r"-?\d{1,6}", index) or uncertain(words) or int(index) < -len(words):
            names = [name] if uncertain(words) else []
            return self.gap_at(node, f"takes it from a list: {syntax.short(node)}", *names)
        return words[int(index)] if int(index) < len(words) else ""

    def _count(self, value: Value, computes: str, name: str) -> str:
        uncertain_text = uncertain(value) if isinstance(value, list) else bool(MARKS.search(value))
        return self.gap(computes, name) if uncertain_text else str(len(value))

    def _has_item(self, name: str, index: str) -> bool:
        items = self.variables.get(name, "")
        return (index in ("0", "-1") and items != []) or (
            isinstance(items, list) and index.isdigit() and int(index) < len(items)
        )

    def _default(
        self, name: str, is_set: bool, value: Value, rest: list[Any], node: Any
    ) -> Value | Alternative:
        """`${x:-y}` and its relatives. A variable of the environment that has a default is taken as unset."""
        operator = rest[0].type
        empty = not is_set or value in ("", [], [""])
        missing = empty if operator.startswith(":") else not is_set
        alternative = Alternative(rest[1:], name)
        if isinstance(value, list) and value and all(map(loose, value)):
            # Whether any of them is there is not known; ${x[@]+"${x[@]}"} is the list in both cases.
            same = operator in ("+", ":+") and syntax.text(rest[-1]).strip('"') == f"${{{name}[@]}}"
            return (
                alternative
                if same
                else self.gap_at(node, f"takes it from a list: {syntax.short(node)}", name)
            )
        if operator in (":+", "+"):
            if not missing and isinstance(value, str) and GAPS.fullmatch(value):
                return value
            return ([] if isinstance(value, list) else "") if missing else Alternative(rest[1:])
        if operator in (":?", "?") or not missing:
            return value
        if operator in (":=", "="):
            self.variables[name] = "".join(self.joined(child) for child in rest[1:])
        return alternative

    def _computed(self, value: Value, rest: list[Any], computes: str, name: str) -> Value:
        """Slices, removed ends and other cases of a text or of a list."""
        operator = rest[0].type
        read = self.pattern if operator in ("%", "%%", "#", "##") else self.joined
        arguments = [read(child) for child in rest[1:] if child.type not in (":", "/")]
        listed = value if isinstance(value, list) else [value]
        if uncertain(listed) or any(MARKS.search(argument) for argument in arguments):
            return self.gap(computes, *([name] if uncertain(listed) else []))
        if operator == ":" and all(re.fullmatch(r"\s*-?\d{1,6}\s*", text) for text in arguments):
            first, *count = [int(text) for text in arguments]
            if name in ("@", "*"):
                first -= 1  # arguments are counted from 1
            if first < 0 or any(size < 0 for size in count):
                return self.gap(computes)
            return value[first : first + count[0]] if count else value[first:]
        changed = literals.removed(operator, arguments) or literals.CASES.get(operator)
        too_long = any(len(text) > _LONGEST_COMPARED for text in listed)
        if changed is None or too_long or (operator in literals.CASES and arguments):
            return self.gap(computes)
        texts = [changed(text) for text in listed]
        return texts if isinstance(value, list) else texts[0]


_DEFAULTS = (":-", "-", ":=", "=", ":?", "?", ":+", "+")
_EXPANSIONS: dict[str, Callable[[ScriptState, Any], Value | Alternative]] = {
    "simple_expansion": ScriptState.expand,
    "expansion": ScriptState.expand,
    "command_substitution": ScriptState._substitution,
    "process_substitution": ScriptState._substitution,
    "arithmetic_expansion": ScriptState._arithmetic,
}
