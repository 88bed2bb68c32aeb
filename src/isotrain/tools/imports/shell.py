"""The commands of a shell script with their words expanded, read from its syntax tree and never run.

Where a condition is not known, every branch is walked from the same variables. What the branches leave behind
is merged: equal values stay, other values become gaps, and words that one branch appends to a list are there
under its condition only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from isotrain.tools.imports import syntax
from isotrain.tools.imports.branches import (
    FunctionReturned,
    ScriptEnded,
    condition,
    merged,
    truth,
    walk_case,
    walk_if,
)
from isotrain.tools.imports.expand import MOST_DEPTH, MOST_STEPS, ScriptState, Value
from isotrain.tools.imports.literals import MARKS, loose, uncertain
from isotrain.tools.imports.source import SECRET, ImportSourceError, Unknown, holds_secret

_BACKGROUND = re.compile(rb"[ \t]*&(?![&>])")
LONGEST_SCRIPT = 1024 * 1024
_MOST_ROUNDS = 100
# Files that set up an environment and not the variables of a training.
_ENVIRONMENTS = re.compile(
    r"(?:.*/)?(?:set_?env\.sh|activate|\.bashrc|\.bash_profile|\.profile|conda\.sh|profile)"
)


@dataclass(frozen=True)
class ShellCommand:
    """`lines` has the line of each word, counted from 1; a word that is not known is `Unknown`.

    `when` has the condition under which each word is there, "" if it always is; `under` that of the command.
    """

    words: tuple[str | Unknown, ...]
    lines: tuple[int, ...]
    when: tuple[str, ...] = ()
    under: str = ""
    conditions: frozenset[int] = frozenset()
    environment: frozenset[str] = frozenset()


@dataclass
class Shell(ScriptState):
    """Walks a script from its first line to its last and keeps what the variables hold."""

    commands: list[ShellCommand] = field(default_factory=list)
    frames: list[dict[str, Value | None]] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)
    read_only: set[str] = field(default_factory=set)
    broken_lines: list[int] = field(default_factory=list)
    source: bytes = b""

    def walk(self, node: Any) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS or self.depth > MOST_DEPTH:
            raise ImportSourceError("the script is too long or too deeply nested to be read")
        self.depth += 1
        follow = _STATEMENTS.get(node.type, Shell._children)
        try:
            if _BACKGROUND.match(self.source, node.end_byte):
                self._isolated(lambda: follow(self, node))
            else:
                follow(self, node)
        finally:
            self.depth -= 1

    def _children(self, node: Any) -> None:
        self.walk_all(node.named_children)

    # Assignments

    def _assignment(self, node: Any) -> None:
        name = syntax.text(node.child_by_field_name("name"))
        value_node = node.child_by_field_name("value")
        appends = any(child.type == "+=" for child in node.children)
        value: Value
        if node.child_by_field_name("name").type == "subscript":
            name = name.partition("[")[0]
            self.assign(name, self.gap_at(node, "sets a part of it", name))
            return
        if value_node is None:
            value = ""
        elif value_node.type == "array":
            value = self.few([word for item in syntax.items(value_node) for word in self.words(item)])
            if any(item.type in ("concatenation", "word") and syntax.text(item)[:1] == "["
                   and "]=" in syntax.text(item) for item in value_node.named_children):  # fmt: skip
                value = self.gap_at(node, "sets parts of it by their keys", name)
        else:
            value = self.joined(value_node)
            if holds_secret(name, value):
                value = SECRET
        before = self.variables.get(name, [] if isinstance(value, list) else "")
        if appends:
            value = self._appended(before, value)
        elif isinstance(before, list) and isinstance(value, str):  # x=a is x[0]=a of a list
            certain = not before or not loose(before[0])
            value = [value, *before[1:]] if certain else self.gap_at(node, "sets a part of it", name)
        self.assign(name, value, node)

    def _appended(self, before: Value, value: Value) -> Value:
        if isinstance(before, list) and isinstance(value, list):
            return self.few([*before, *value])
        if isinstance(before, str) and isinstance(value, str):
            return self.bounded(before + value)
        if isinstance(value, list):
            return self.few([str(before), *value])
        first = before[0] if before else ""
        return self.gap("text is appended to a list") if MARKS.search(first) else [first + value, *before[1:]]

    def assign(self, name: str, value: Value, node: Any = None) -> None:
        """Give a variable its value, unless `--set` did."""
        if name not in self.pinned:
            fixed = name in self.read_only
            self.variables[name] = self.gap("it is set although it is readonly", name) if fixed else value
            return
        pinned = self.pinned[name]
        if node is not None and isinstance(value, str) and not MARKS.search(value) and value != pinned:
            self.note(node, f"sets {name} to {self.plain(value)!r}: --set {name} goes before it")

    def _declaration(self, node: Any) -> None:
        """`export`, `declare`, `local`, `readonly`: a local variable ends with its function."""
        keyword = syntax.text(node.children[0])
        options = "".join(syntax.text(child) for child in node.named_children if child.type == "word")
        declares = keyword in ("declare", "typeset")
        local = self.frames and (keyword == "local" or (declares and "g" not in options))
        for child in node.named_children:
            if child.type not in ("variable_assignment", "variable_name"):
                continue
            is_name = child.type == "variable_name"
            name = syntax.text(child if is_name else child.child_by_field_name("name"))
            if local:
                self.frames[-1].setdefault(name, self.variables.get(name))
                self.variables.pop(name, None)
            if not is_name:
                self.walk(child)
            elif (declares or keyword == "local") and name not in self.variables:
                self.assign(name, [] if re.search(r"-\w*a", options) else "")
            if re.search(r"-\w*[nAilu]", options) and (keyword != "export"):
                self.assign(name, self.gap_at(node, f"declares it as {options}", name))
            if keyword == "readonly" or re.search(r"-\w*r", options):
                self.read_only.add(name)
            if keyword == "export" or re.search(r"-\w*x", options):
                self.exported.add(name)

    def _unset(self, node: Any) -> None:
        names = [syntax.text(child) for child in node.named_children]
        for name in names:
            if "-f" in names:
                self.functions.pop(name, None)
                continue
            if syntax.NAME.fullmatch(name):
                self.variables.pop(name, None)
            elif "[" in name:
                name = name.strip("'\"").partition("[")[0]
                self.assign(name, self.gap_at(node, "unsets a part of it", name))

    # Commands

    def _command(self, node: Any, behind: Sequence[Any] = ()) -> None:
        """A command; `behind` are its redirections, which may have words of it between them."""
        words: list[str] = []
        lines: list[int] = []
        before = [child for child in node.named_children if child.type == "variable_assignment"]
        for child in [part for outer in (*node.named_children, *behind) for part in syntax.words_in(outer)]:
            expanded = self.words(child)
            words += expanded
            lines += [syntax.line(child)] * len(expanded)
        if not words:
            return
        name, plain = words[0], 0
        while name in ("command", "builtin", "time") and plain < len(words) - 1:
            plain += 1
            name = words[plain]
        if name in self.functions and words[0] in ("time", name) and self.depth < MOST_DEPTH - 10:
            saved = dict(self.variables) if before else None
            self.walk_all(before)
            self._call(name, words[plain + 1 :])
            if saved is not None:
                self.variables = saved
            return
        if "xargs" in words[:-1]:
            words.append(self.gap(f"line {lines[0]}: xargs adds words"))
            lines.append(lines[0])
        known = [self.known(word) for word in words]
        under, depends = self.under[-1:], self.depends_on(*words)
        label = self.labels[under[0]] if under else None
        self.commands.append(
            ShellCommand(
                tuple(word for word, _ in known),
                tuple(lines),
                tuple(when for _, when in known),
                label.text if label else "",
                depends | (label.conditions if label else frozenset()),
                frozenset(self.exported).union(syntax.text(part).partition("=")[0] for part in before),
            )
        )
        self._builtin(name, words[plain:], lines[0])

    def _builtin(self, name: str, words: list[str], line: int) -> None:
        """Commands that change variables, run other text, or end the script."""
        arguments = words[1:]
        if name in ("source", ".") and arguments:
            self._sourced(arguments[0], line)
        elif name == "eval":
            self._text(" ".join(arguments), line, f"line {line} runs text as a program, which may set it")
        elif name in ("exit", "return") or (name == "exec" and arguments):
            if name != "return":
                raise ScriptEnded
            if self.frames:
                raise FunctionReturned
        elif name == "shopt" and {"nullglob", "failglob", "extglob", "nocasematch"} & {*arguments}:
            self.glob_options = True
        elif name == "shopt" and "expand_aliases" in arguments:
            self.broken_lines.append(line)
        elif name == "set" and arguments and (arguments[0] == "--" or arguments[0][:1] not in ("-", "+")):
            self._positional(arguments[1:] if arguments[0] == "--" else arguments)
        elif name == "shift" and "@" in self.variables:
            given = self.variables["@"]
            count = arguments[0] if arguments else "1"
            certain = isinstance(given, list) and count.isdigit() and not any(map(loose, given[: int(count)]))
            rest = given[int(count) :] if certain else [self.gap(f"line {line} shifts the arguments")]
            self._positional(list(rest))
        elif name in syntax.SETTERS:
            for word in arguments:
                if syntax.NAME.fullmatch(target := re.split(r"[+*/%-]?=|\+\+|--", word)[0]):
                    self.assign(target, self.gap(f"line {line} sets it with {name}", target))
        for place, word in enumerate(words[:-2]):
            if re.fullmatch(r"(?:.*/)?(?:ba|z|da)?sh", word) and re.fullmatch(r"-\w*c", words[place + 1]):
                self._program(words[place + 2], line)

    def _sourced(self, file: str, line: int) -> None:
        plain = self.plain(file)
        harmless = _ENVIRONMENTS.fullmatch(plain)
        rest = ", and taken to set no variable" if harmless else ""
        self.notes.append(f"line {line}: {plain} is sourced; it was not read{rest}")
        if not harmless:
            self._anything(f"line {line} sources {plain}, which may set it")

    def _anything(self, why: str) -> None:
        """Any variable may have any value from here."""
        for name in self.variables:
            self.assign(name, self.gap(why, name))
        self.others_set = why

    def _text(self, text: str, line: int, why: str) -> None:
        """Walk a text that the script runs as a program."""
        if MARKS.search(text):
            self._anything(why)
            return
        data = ("\n" * (line - 1) + text + "\n").encode("utf-8", "replace")
        tree = syntax.parser().parse(data)
        self.broken_lines += syntax.errors(tree.root_node, data)
        outside, self.source = self.source, data
        try:
            self.walk(tree.root_node)
        finally:
            self.source = outside

    def _program(self, text: str, line: int) -> None:
        """`bash -c TEXT`: only exported variables reach it, and none comes back."""
        outside, others = self.variables, self.others_set
        self.variables = {name: value for name, value in outside.items() if name in self.exported}
        try:
            self._text(text, line, f"line {line} runs a text that is not known")
        except (ScriptEnded, FunctionReturned):
            pass
        finally:
            self.variables, self.others_set = outside, others

    def _positional(self, arguments: list[str]) -> None:
        for key in [key for key in self.variables if key.isdigit()]:
            del self.variables[key]
        self.variables["@"] = arguments
        certain = next((place for place, word in enumerate(arguments) if loose(word)), len(arguments))
        for place, word in enumerate(arguments[:10], start=1):
            known = place <= certain
            self.variables[str(place)] = word if known else self.gap("words before it may be missing")
        for place in range(len(arguments) + 1, 10):
            self.variables[str(place)] = "" if certain == len(arguments) else self.gap("words may be missing")

    def _call(self, name: str, arguments: list[str]) -> None:
        outer = {key: value for key, value in self.variables.items() if key.isdigit() or key == "@"}
        self._positional(arguments)
        body = self.functions.pop(name)  # a function that calls itself is not followed
        self.frames.append({})
        self.returned.append([])
        try:
            if body is None:
                self._anything(f"it may be set by {name}, which a condition defines")
            else:
                self.walk(body)
        except FunctionReturned:
            pass
        finally:
            self.functions[name] = body
            if states := self.returned.pop():
                here = self.label("otherwise", *self.labels[states[0][0]].conditions)
                self.variables = merged(self, [(here, self.variables), *states])
            for key, value in self.frames.pop().items():
                if value is None:
                    self.variables.pop(key, None)
                else:
                    self.variables[key] = value
            for key in [key for key in self.variables if key.isdigit() or key == "@"]:
                del self.variables[key]
            self.variables.update(outer)

    def _function(self, node: Any) -> None:
        body = node.child_by_field_name("body")
        if body is not None:
            self.functions[syntax.text(node.child_by_field_name("name"))] = body

    def _redirected(self, node: Any) -> None:
        """`read -r -d '' name <<EOF` puts a text into a variable; other redirections change no word."""
        body, *redirects = node.named_children
        heredocs = [child for child in redirects if child.type == "heredoc_redirect"]
        parts = [part for redirect in heredocs for part in redirect.named_children]
        before = len(self.commands)
        if body.type == "command":
            self._command(body, redirects)
        elif body.type in syntax.REDIRECTS:
            self._children(node)
        else:
            self.walk(body)
            self.broken_lines += [syntax.line(word) for child in redirects for word in syntax.words_in(child)]
        for part in parts:  # `cat <<EOF && next`: what follows stands before the text
            if part.type in syntax.STATEMENTS:
                self.walk(part)
        bodies = [part for part in parts if part.type == "heredoc_body"]
        if bodies and len(self.commands) > before and self.commands[before].words[0] == "read":
            self._read(self.commands[before].words[1:], body, bodies[0], parts)

    def _read(self, words: tuple[str | Unknown, ...], command: Any, body: Any, parts: list[Any]) -> None:
        known = [word for word in words if isinstance(word, str)]
        names = [word for word in known if syntax.NAME.fullmatch(word)]
        options = "".join(word for word in known if word[:1] == "-")
        if len(names) != 1 or "d" not in options or set(options) - set("-rd"):
            return  # a gap already
        start = next(part for part in parts if part.type == "heredoc_start")
        quoted = syntax.text(start)[:1] in ("'", '"', "\\")
        text = syntax.text(body) if quoted else self._heredoc(body)
        if start.parent.children[0].type == "<<-":
            text = re.sub(r"(?m)^\t+", "", text)
        if "r" not in options:
            text = re.sub(r"\\(.)", lambda escape: escape[1].strip("\n"), text, flags=re.S)
        kept = any(syntax.text(child) == "IFS=" for child in command.named_children)
        self.assign(names[0], text if kept else text.strip())

    def _heredoc(self, body: Any) -> str:
        """Expanded like a string in double quotes; the grammar does not see all expansions in it."""
        before = "\n" * body.start_point[0]
        text = syntax.text(body).replace('"', '\\"')
        tree = syntax.parser().parse(f'{before}x="{text}"'.encode())
        strings = [node for node in syntax.below(tree.root_node) if node.type == "string"]
        return self.joined(strings[0]) if strings else self.gap_at(body, "has a text that is not read")

    def _apart(self, node: Any) -> None:
        """A subshell and each part of a pipeline have variables of their own."""
        if node.type == "pipeline":
            for part in node.named_children:
                self._isolated(partial(self.walk, part))
        else:
            self._isolated(lambda: self.walk_all(node.named_children))

    def _isolated(self, walk: Callable[[], object]) -> None:
        outside = dict(self.variables)
        try:
            walk()
        except (ScriptEnded, FunctionReturned):
            pass
        finally:
            self.variables = outside

    def _arithmetic_statement(self, node: Any) -> None:
        """`{ ...; }`, or `(( x += 1 ))`, which sets what it names."""
        if not syntax.text(node).startswith("(("):
            self._children(node)
            return
        for name in syntax.assigned_numbers(node):
            self.assign(name, self.gap_at(node, f"computes it: {syntax.short(node)}", name))

    def _loop(self, node: Any) -> None:
        variable = node.child_by_field_name("variable")
        body = node.child_by_field_name("body")
        leaves = any(
            part.type == "command" and syntax.text(part).split()[:1] in (["break"], ["continue"])
            for part in syntax.below(node)
        )
        if node.type == "for_statement" and variable is not None and node.children[0].type == "for":
            name = syntax.text(variable)
            items = [word for item in node.children_by_field_name("value") for word in self.words(item)]
            if name in self.pinned:
                self.pins_used.add(name)
                items = [self.pinned[name]]
            listed = any(child.type == "in" for child in node.children)
            if listed and not uncertain(items) and not leaves and len(items) <= _MOST_ROUNDS:
                for item in items:
                    self.assign(name, item)
                    self.walk(body)
                return
        elif node.type == "while_statement":
            until = node.children[0].type == "until"
            if truth(self, node.child_by_field_name("condition")) is until:
                return
        self._unknown_loop(node, body)

    def _unknown_loop(self, node: Any, body: Any) -> None:
        """A loop of unknown rounds: what it sets is not known in it, nor behind it."""
        line = syntax.line(node)
        why = f"it changes in the loop of line {line}"
        number = condition(self, node, f"the loop of line {line} runs")
        names = set(syntax.assigned(node, self.functions, self.variables))

        def forget() -> None:
            for name in names:
                before = self.variables.get(name)
                lost = self.gap(why, name)
                self.assign(name, [*before, lost] if isinstance(before, list) and name in appended else lost)

        appended = {name for name in names if syntax.only_appends(node, name)}
        runs = self.label(f"in the loop of line {line}", number)
        forget()
        self.under.append(runs)
        try:
            self.walk(body)
        except (ScriptEnded, FunctionReturned):
            pass
        finally:
            self.under.pop()
            forget()


_STATEMENTS: dict[str, Callable[[Shell, Any], object]] = {
    "variable_assignment": Shell._assignment,
    "declaration_command": Shell._declaration,
    "unset_command": Shell._unset,
    "command": Shell._command,
    "function_definition": Shell._function,
    "redirected_statement": Shell._redirected,
    "compound_statement": Shell._arithmetic_statement,
    "subshell": Shell._apart,
    "pipeline": Shell._apart,
    "case_statement": walk_case,
    "if_statement": walk_if,
    **dict.fromkeys(("list", "negated_command", "test_command"), truth),
    **dict.fromkeys(("comment", "heredoc_redirect", "file_redirect"), lambda shell, node: None),
    **dict.fromkeys(("herestring_redirect", "command_substitution"), lambda shell, node: None),
    **dict.fromkeys(("for_statement", "c_style_for_statement", "while_statement"), Shell._loop),
}


def read_script(text: str, given: dict[str, str] | None = None) -> Shell:
    """All commands of a script; nothing of it is run. `given` has the variables of `--set`."""
    data = MARKS.sub("", text).encode("utf-8", "replace")
    if len(data) > LONGEST_SCRIPT:
        raise ImportSourceError(f"longer than {LONGEST_SCRIPT // 1024} KiB; is this a shell script?")
    data += b"\n"  # the grammar stumbles over a backslash at the end of the last line
    shell = Shell(pinned=dict(given or {}))
    try:
        tree = syntax.parser().parse(data)
        if tree.root_node.has_error:  # the grammar stumbles over arithmetic that begins with a bracket
            data = data.replace(b"$(((", b"$(( (")
            tree = syntax.parser().parse(data)
        shell.broken_lines, shell.source = syntax.errors(tree.root_node, data), data
        shell.walk(tree.root_node)
    except (ScriptEnded, FunctionReturned):
        pass
    except RecursionError:
        raise ImportSourceError("the script is too deeply nested to be read") from None
    return shell
