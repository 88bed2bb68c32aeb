"""The tests of a data row for code, in the forms that public data sets have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
FORMS = (
    "{inputs, outputs}, {inputs, outputs, fn_name}, a list of {input, output}, a list of assert statements, "
    "{test_list}, or {test, entry_point}"
)


@dataclass(frozen=True)
class StdinTest:
    """A program that reads stdin and prints `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """A function that returns `expected`; it may be a method of a class `Solution`."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any
    wrapped: bool = False
    """`expected` may also be a list around what the function returns, as all results of this row are."""


@dataclass(frozen=True)
class SourceTest:
    """Statements that raise nothing."""

    source: str


Test = StdinTest | CallTest | SourceTest


@dataclass(frozen=True)
class CodeTests:
    tests: tuple[Test, ...]
    setup: str = ""
    """Source that runs before the solution where a test is not a program of its own."""


def read_tests(answer: Any, row: Mapping[str, Any]) -> CodeTests:
    """From the column `reward.answer_key`, and from columns of the row beside it where a form has several.

    Raises ValueError where there are none."""
    if isinstance(answer, str):
        answer = _read_text(answer, row)
    if isinstance(answer, Mapping):
        tests = _from_mapping(answer, row)
    elif isinstance(answer, Sequence) and answer and not isinstance(answer, (str, bytes)):
        tests = _from_list(answer, row)
    else:
        tests = None
    if tests is None or not tests.tests:
        raise ValueError(f"the row has no tests; check reward.answer_key, which may hold {FORMS}")
    return tests


def _read_text(text: str, row: Mapping[str, Any]) -> Any:
    """JSON, or HumanEval's column of source with the name of the function in another."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"test": text, "entry_point": row.get("entry_point")}


def _from_mapping(answer: Mapping[str, Any], row: Mapping[str, Any]) -> CodeTests | None:
    inputs, outputs = answer.get("inputs"), answer.get("outputs")
    if isinstance(inputs, Sequence) and isinstance(outputs, Sequence) and not isinstance(inputs, str):
        if len(inputs) != len(outputs):
            raise ValueError(f"the row has {len(inputs)} inputs and {len(outputs)} outputs")
        name = answer.get("fn_name")
        wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
        return CodeTests(tuple(_pair(i, o, name, wrapped) for i, o in zip(inputs, outputs, strict=True)))
    if isinstance(answer.get("test"), str) and isinstance(answer.get("entry_point"), str):
        return CodeTests((SourceTest(f"{answer['test']}\n\ncheck({answer['entry_point']})\n"),))
    if isinstance(answer.get("test_list"), Sequence):
        return _from_list(answer["test_list"], answer)
    return None


def _from_list(answer: Sequence[Any], row: Mapping[str, Any]) -> CodeTests | None:
    if all(isinstance(test, str) for test in answer):
        imports = row.get("test_imports")
        lines = [row.get("test_setup_code"), *(imports if isinstance(imports, Sequence) else ())]
        setup = "\n".join(line for line in lines if isinstance(line, str))
        return CodeTests(tuple(SourceTest(test) for test in answer), setup)
    if all(isinstance(test, Mapping) and "input" in test and "output" in test for test in answer):
        name = _function_name(row)
        return CodeTests(
            tuple(
                _pair(test["input"], test["output"], name if test.get("testtype") == "functional" else None)
                for test in answer
            )
        )
    return None


def _function_name(row: Mapping[str, Any]) -> str | None:
    """LiveCodeBench keeps it in its column `metadata`, which is JSON."""
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            return None
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else None


def _pair(given: Any, expected: Any, function: str | None, wrapped: bool = False) -> Test:
    if not function:
        return StdinTest(_lines(given), _lines(expected))
    if isinstance(given, str):  # one argument a line, as JSON, and so is the result
        return CallTest(function, tuple(_json(line) for line in given.split("\n")), _json(expected))
    return CallTest(function, tuple(given) if isinstance(given, Sequence) else (given,), expected, wrapped)


def _lines(value: Any) -> str:
    """APPS has some texts as lists of their lines."""
    return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def same_output(printed: str, expected: str) -> bool:
    """Equal lines, without the space at their ends; numbers may be written in another way."""
    ours, theirs = _stripped(printed), _stripped(expected)
    return len(ours) == len(theirs) and all(
        a == b or _same_numbers(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def _stripped(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_numbers(a: str, b: str) -> bool:
    ours, theirs = a.split(), b.split()
    if len(ours) != len(theirs) or not all(map(_NUMBER.fullmatch, ours + theirs)):
        return False
    try:
        return all(Decimal(x) == Decimal(y) for x, y in zip(ours, theirs, strict=True))
    except InvalidOperation:  # an exponent beyond what Decimal can hold
        return False


def same_value(returned: Any, expected: Any) -> bool:
    """Equal as JSON, with its types: a boolean, a text and a list are no number; 1.0 is 1, and NaN is NaN."""
    if isinstance(expected, bool) or isinstance(returned, bool):
        return returned is expected
    if isinstance(expected, (int, float)) and isinstance(returned, (int, float)):
        return returned == expected or (returned != returned and expected != expected)
    if isinstance(expected, (list, tuple)) and isinstance(returned, (list, tuple)):
        return len(returned) == len(expected) and all(map(same_value, returned, expected))
    if isinstance(expected, Mapping) and isinstance(returned, Mapping):
        named = {_key(key): value for key, value in expected.items()}
        return returned.keys() == named.keys() and all(same_value(returned[k], v) for k, v in named.items())
    return type(returned) is type(expected) and bool(returned == expected)


def _key(key: Any) -> str:
    """As JSON writes it: results come as JSON, but a row's may not."""
    return key if isinstance(key, str) else json.dumps(key)


def passed_calls(returned: Mapping[int, Any], tests: Mapping[int, CallTest]) -> set[int]:
    """Which calls have given what was expected, by their index.

    APPS has some rows whose results are all wrapped in a list of one, and no mark that says so. Then all
    are read in the same way, the one in which more have passed: `5` and `[5]` are never both right."""
    tests = {index: test for index, test in tests.items() if index in returned}
    plain = {index for index, test in tests.items() if same_value(returned[index], test.expected)}
    inner = {i for i, test in tests.items() if test.wrapped and same_value(returned[i], test.expected[0])}
    return max(plain, inner, key=len)
