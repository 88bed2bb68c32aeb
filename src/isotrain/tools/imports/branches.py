"""Conditions of a shell script: whether they hold, and what their branches leave if that is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from isotrain.tools.imports import literals, syntax
from isotrain.tools.imports.expand import ScriptState, Value
from isotrain.tools.imports.literals import MARKS, loose, uncertain
from isotrain.tools.imports.source import ScriptCondition, Unknown

_MOST_COMPARED = 100
# Commands that are taken to succeed before `&&` and `||`; others may fail.
_SUCCEED = {
    "cd", "mkdir", "echo", "export", "set", "pip", "pip3", "git", "rm", "cp", "mv", "ln", "sleep", "ray",
    "conda", "ulimit", "pushd", "popd", "wget", "touch", "chmod", "sed", "read", "unset", "hf",
    "huggingface-cli",
}  # fmt: skip


class ScriptEnded(Exception):
    """`exit`: what follows does not run."""


class FunctionReturned(Exception):
    """`return`: what follows in the function does not run."""


Branch = tuple[int, str, Callable[[], None]]


def condition(state: ScriptState, node: Any, what: str = "") -> int:
    """A condition that is not known, for the report: its text, and the variables that decide it."""
    names: list[str] = []
    for part in syntax.below(node):
        name = syntax.text(part)
        if part.type == "variable_name" and name not in state.pinned:
            value = state.variables.get(name)
            listed = value if isinstance(value, list) else [value or ""]
            has_default = part.parent.type == "expansion" and ":-" in syntax.text(part.parent)
            if uncertain(listed) or (value is None and not has_default):
                names.append(name)
    line = syntax.line(node)
    decided_by = tuple(dict.fromkeys(names)) or (f"if:{line}",)
    state.conditions.append(ScriptCondition(line, what or syntax.short(node), decided_by))
    return len(state.conditions) - 1


def fork(state: ScriptState, branches: list[Branch]) -> None:
    """Walk each branch from the same variables, and merge what they leave behind."""
    before, functions, others = state.variables, state.functions, state.others_set
    state.steps += len(before) * len(branches) // 20  # each branch copies and merges all of them
    alive: list[tuple[int, dict[str, Value]]] = []
    kept: list[dict[str, Any]] = []
    ended: BaseException = ScriptEnded()
    others_set = others
    for label, title, body in branches:
        state.variables, state.functions, state.others_set = dict(before), dict(functions), others
        state.under.append(label)
        changed = ["the script ends"]
        try:
            body()
            alive.append((label, state.variables))
            kept.append(state.functions)
            changed = list(_changes(state, before, state.variables))
        except (ScriptEnded, FunctionReturned) as error:
            ended = error
            if isinstance(error, FunctionReturned) and state.returned:
                state.returned[-1].append((label, state.variables))
        finally:
            state.under.pop()
        others_set = others_set or state.others_set
        for number in state.labels[label].conditions:
            sets = {**state.conditions[number].sets, title: tuple(changed)}
            state.conditions[number] = replace(state.conditions[number], sets=sets)
    state.variables = merged(state, alive) if alive else before
    state.others_set = others_set
    state.functions = {
        name: body if all(other.get(name) == body for other in kept) else None
        for other in kept
        for name, body in other.items()
    }
    if not alive:
        raise ended


def walk_case(state: ScriptState, node: Any) -> None:
    subject_node = node.child_by_field_name("value")
    subject = state.joined(subject_node) if subject_node is not None else ""
    items = [child for child in node.named_children if child.type == "case_item"]
    number = (
        condition(state, subject_node, f"case {syntax.short(subject_node)}") if MARKS.search(subject) else -1
    )
    branches: list[Branch] = []
    complete = False
    for item in items:
        values = item.children_by_field_name("value")
        patterns = [state.pattern(child) for child in values]
        fits = [literals.matches(subject, pattern) for pattern in patterns]
        body = [child for child in item.named_children if child not in values]
        falls = any(child.type in (";&", ";;&") for child in item.children)
        if number < 0:
            if falls or None in fits or any(MARKS.search(pattern) for pattern in patterns):
                number = condition(state, subject_node or node, f"case {syntax.short(subject_node or node)}")
            elif any(fits):
                state.walk_all(body)
                return
            else:
                continue
        shown = "|".join(syntax.text(child).strip("'\"") for child in values)
        text = state.conditions[number].text.removeprefix("case ")
        when = f"if {text} is {shown}" if shown != "*" else f"for other values of {text}"
        branches.append((_label(state, when, number), shown, partial(state.walk_all, body)))
        complete = complete or "*" in patterns
    if number >= 0:
        if not complete:
            branches.append((_label(state, "otherwise", number), "otherwise", lambda: None))
        fork(state, branches)


def _label(state: ScriptState, when: str, *numbers: int) -> int:
    """The label of a branch, with the line of the condition that decides it last."""
    return state.label(f"{when} (line {state.conditions[numbers[-1]].line})", *numbers)


def walk_if(state: ScriptState, node: Any) -> None:
    conditions = [child for child in node.children_by_field_name("condition") if child.is_named]
    clauses = [child for child in node.named_children if child.type in ("elif_clause", "else_clause")]
    first = [child for child in node.named_children if child not in conditions and child not in clauses]
    state.walk_all(conditions[:-1])
    branches: list[Branch] = []
    numbers: list[int] = []
    for test, body in [(conditions[-1] if conditions else None, first), *map(_clause, clauses)]:
        holds = _decided(state, test) if test is not None else True
        if holds is False:
            continue
        if holds is True and not branches:
            state.walk_all(body)
            return
        when = "otherwise"
        if holds is None:
            numbers.append(condition(state, test))
            when = f"if {state.conditions[numbers[-1]].text}"
        branches.append((_label(state, when, *numbers), when, partial(state.walk_all, body)))
        if holds is True:
            break
    else:
        if not branches:
            return
        branches.append((_label(state, "otherwise", *numbers), "otherwise", lambda: None))
    fork(state, branches)


def _decided(state: ScriptState, node: Any) -> bool | None:
    """Whether a condition holds; `--set if:LINE=true` says so for what no variable decides."""
    pin = f"if:{syntax.line(node)}"
    holds = truth(state, node)
    if holds is None and pin in state.pinned:
        state.pins_used.add(pin)
        return state.pinned[pin].lower() in ("true", "yes", "1")
    return holds


def truth(state: ScriptState, node: Any) -> bool | None:
    """Walk a condition, and say whether it holds; None if that is not known."""
    children = node.named_children
    if node.type == "test_command":
        state.testing = True
        try:
            if not syntax.text(node).startswith("[["):
                return _bracket(state, list(syntax.bracket_words(node)))
            return _test(state, children[0]) if len(children) == 1 else None
        finally:
            state.testing = False
    if node.type == "negated_command" and len(children) == 1:
        inner = truth(state, children[0])
        return None if inner is None else not inner
    if node.type == "compound_statement" and syntax.text(node).startswith("(("):
        state.walk(node)
        if len(children) != 1:
            return None
        result = syntax.calculate(children[0], lambda name: state.number(name, node))
        return None if isinstance(result, Unknown) else result != 0
    if node.type == "compound_statement" and children:
        state.walk_all(children[:-1])
        return truth(state, children[-1])
    if node.type == "list" and len(children) == 2:
        return _both(state, node)
    if node.type == "command" and (name := syntax.text(node.named_children[0])) in ("true", ":", "false"):
        state.walk(node)
        return name != "false"
    state.walk(node)
    return True if node.type in ("variable_assignment", "declaration_command", "unset_command") else None


def _both(state: ScriptState, node: Any) -> bool | None:
    """`a && b` and `a || b`."""
    first, second = node.named_children
    is_and = any(child.type == "&&" for child in node.children)
    left = _decided(state, first)
    if left is None and _succeeds(first):
        left = True
    if left is not None:
        return truth(state, second) if left == is_and else left
    number = condition(state, first)
    text = state.conditions[number].text
    right: list[bool | None] = []
    runs, skips = (f"if {text}", f"unless {text}") if is_and else (f"unless {text}", f"if {text}")
    second_runs = (_label(state, runs, number), runs, lambda: right.append(truth(state, second)))
    fork(state, [second_runs, (_label(state, skips, number), skips, lambda: None)])
    return not is_and if right == [not is_and] else None


def _changes(state: ScriptState, before: dict[str, Value], after: dict[str, Value]) -> Iterator[str]:
    """Assignments of a branch, for the report."""
    for name, value in after.items():
        old = before.get(name)
        if old == value or name.isdigit() or name == "@":
            continue
        if isinstance(value, str):
            yield f"{name}={state.plain(value)}"
        elif isinstance(old, list) and value[: len(old)] == old:
            yield f"{name}+=({' '.join(map(state.plain, value[len(old) :]))})"
        else:
            yield f"{name}=({' '.join(map(state.plain, value))})"
    for name in before.keys() - after.keys():
        yield f"unset {name}"


def merged(state: ScriptState, branches: list[tuple[int, dict[str, Value]]]) -> dict[str, Value]:
    result: dict[str, Value] = {}
    for name in dict.fromkeys(name for _, variables in branches for name in variables):
        values = [(label, variables.get(name)) for label, variables in branches]
        first = values[0][1]
        if all(value == first for _, value in values):
            result[name] = first if first is not None else ""
        elif all(value is None or isinstance(value, list) for _, value in values):
            result[name] = state.few(_merged_lists(state, [(label, list(v or [])) for label, v in values]))
        else:
            result[name] = _either(state, name, values)
    return result


def _either(state: ScriptState, name: str, values: list[tuple[int, Value | None]]) -> str:
    """A variable with another value in each branch."""
    cases: list[str] = []
    names: list[str] = []
    for label, value in values:
        text = state.plain(value if isinstance(value, str) else " ".join(value or []))
        cases.append(f"{text or 'empty'} {state.labels[label].text}")
        for number in state.labels[label].conditions:
            names += state.conditions[number].names
    texts = tuple((label, value or "") for label, value in values if not isinstance(value, list))
    options = texts if len(texts) == len(values) else ()
    return state.gap(f"{name} is {', '.join(cases)}", *dict.fromkeys(names), options=options)


def _merged_lists(state: ScriptState, lists: list[tuple[int, list[str]]]) -> list[str]:
    """Words of all lists stay; the others are there under the condition of their branch."""
    earlier, words = lists[0]
    for label, other in lists[1:]:
        same = next((i for i, (a, b) in enumerate(zip(words, other, strict=False)) if a != b), None)
        same = min(len(words), len(other)) if same is None else same
        rest, other_rest = words[same:], other[same:]
        codes = [("replace", 0, len(rest), 0, len(other_rest))]
        if max(len(rest), len(other_rest)) <= _MOST_COMPARED:
            codes = [*SequenceMatcher(None, rest, other_rest, autojunk=False).get_opcodes()]
        merged_words = words[:same]
        for kind, first, last, start, end in codes:
            if kind == "equal":
                merged_words += rest[first:last]
                continue
            merged_words += [
                word if loose(word) and label != lists[1][0] else state.maybe(word, earlier)
                for word in rest[first:last]
            ]
            merged_words += [state.maybe(word, label) for word in other_rest[start:end]]
        words = merged_words
        text = f"{state.labels[earlier].text}, or {state.labels[label].text}"
        earlier = state.label(text, *state.labels[earlier].conditions, *state.labels[label].conditions)
    return words


def _bracket(state: ScriptState, nodes: list[Any]) -> bool | None:
    """The words of `[ ... ]`: operators as they are, others expanded and split as bash does."""
    words: list[str | None] = []
    for node in nodes:
        expanded = state.words(node) if node.is_named else [syntax.text(node)]
        if any(map(loose, expanded)):
            return None
        words += [None if MARKS.search(word) else word for word in expanded]
    return syntax.evaluate(words)


def _test(state: ScriptState, node: Any) -> bool | None:
    """The expression of `[[ ... ]]`."""
    parts = [child for child in node.children if child.type not in ("(", ")")]
    if node.type == "parenthesized_expression" and len(parts) == 1:
        return _test(state, parts[0])
    if node.type == "unary_expression" and len(parts) == 2:
        if parts[0].type == "!":
            inner = _test(state, parts[1])
            return None if inner is None else not inner
        words = [syntax.text(parts[0]), state.joined(parts[1])]
    elif node.type == "binary_expression" and len(parts) == 3:
        operator = syntax.text(parts[1])
        if operator in ("&&", "||"):
            sides = [_test(state, parts[0]), _test(state, parts[2])]
            decides = operator == "||"
            return decides if decides in sides else None if None in sides else not decides
        if parts[0].type == "unary_expression" and parts[0].children[0].type == "!":  # the grammar's order
            inner = _compared(state, [parts[0].children[1], *parts[1:]])
            return None if inner is None else not inner
        return _compared(state, parts)
    else:
        words = ["-n", state.joined(node)]
    return None if any(MARKS.search(word) for word in words) else syntax.compare(words, patterns=False)


def _compared(state: ScriptState, parts: list[Any]) -> bool | None:
    """`left OPERATOR right` in `[[`."""
    operator = syntax.text(parts[1])
    is_pattern = operator in ("=", "==", "!=")
    words = [state.joined(parts[0]), operator, (state.pattern if is_pattern else state.joined)(parts[2])]
    return None if any(MARKS.search(word) for word in words) else syntax.compare(words, patterns=True)


def _clause(node: Any) -> tuple[Any, list[Any]]:
    parts = node.named_children
    return (None, parts) if node.type == "else_clause" or not parts else (parts[0], parts[1:])


def _succeeds(node: Any) -> bool:
    """Whether a command is taken to succeed."""
    if node.type in ("list", "redirected_statement") and node.named_children:
        return _succeeds(node.named_children[-1 if node.type == "list" else 0])
    return node.type == "command" and (syntax.text(node).split() or [""])[0] in _SUCCEED
