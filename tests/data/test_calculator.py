from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from isotrain.data.prepare import calculator
from isotrain.data.prepare.calculator import Calculator, evaluate
from isotrain.environments.interfaces import load_environment


@pytest.mark.parametrize(
    "expression, result",
    [
        ("48 / 2 + 48", "72"),
        ("(15 + 27) * 8", "336"),
        ("15+27*8", "231"),
        ("  -(3 - 10) ", "7"),
        ("0.1 + 0.2", "0.3"),
        ("12 / 60 * 50", "10"),
        ("1 / 3", "0.3333333333"),
        ("2 - 5", "-3"),
    ],
)
def test_results_are_exact(expression: str, result: str) -> None:
    assert Calculator().calculate(expression) == result


HOSTILE = [
    "",
    "48 / 2 =",
    "forty",
    "2 ** 9",
    "7 // 2",
    "7 % 2",
    "1 << 9",
    "~1",
    "not 1",
    "True + 1",
    "'a' * 3",
    "b'a' * 3",
    "1j",
    "[1][0]",
    "1 if 1 else 2",
    "(lambda: 1)()",
    "(x := 1)",
    "abs(-1)",
    "__import__('os').system('true')",
    "().__class__.__bases__[0].__subclasses__()",
    "f'{1}'",
    "1; 2",
    "1\n2",
    "import os",
    "1 < 2",
    "1, 2",
    "...",
    "1e999",
    "9" * 200,
    "9e99 * 9e99",
    "9**9**9**9",
    "(" * 99,
    "(" * 49 + "1" + ")" * 49 + "x",
    "-" * 5000 + "1",
    "1 / 0",
    "1 / (2 - 2)",
    "\x00",
    "1\x00",
    "\ud800",
]


@pytest.mark.parametrize("expression", HOSTILE)
def test_anything_else_is_refused_at_once(expression: str) -> None:
    started = time.process_time()
    with pytest.raises(ValueError, match=r"numbers|characters|zero|large"):
        evaluate(expression)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("value", [None, 7, 1.5, ["1 + 1"], {"a": 1}, True])
def test_arguments_of_other_types_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="text"):
        Calculator().calculate(value)


def test_a_long_but_allowed_expression_is_no_burden() -> None:
    nested = "(" * 45 + "1" + ")" * 45
    assert evaluate(nested) == 1
    assert evaluate("-" * 98 + "1") == 1
    assert evaluate("+".join(["1"] * 50)) == 50


def test_nothing_of_the_language_is_executed() -> None:
    events: list[str] = []
    watching = True
    sys.addaudithook(lambda event, _: events.append(event) if watching else None)
    for expression in HOSTILE:
        with pytest.raises(ValueError):
            evaluate(expression)
    watching = False
    assert not {"exec", "import", "os.system", "open"} & set(events)
    assert "compile" in events  # of the parser: the hook works


def test_it_is_an_environment_with_one_tool() -> None:
    """As the process of the episodes takes it: errors are told to the policy."""
    source = Path(calculator.__file__).read_text()
    factory, known = load_environment("calculator.py:Calculator", source)
    assert known["kind"] == "tools"
    (tool,) = known["tools"]
    assert tool["function"]["name"] == "calculate"
    assert tool["function"]["parameters"]["required"] == ["expression"]
    environment = factory()
    row = {"prompt": [], "prompt_without_tool": [], "reward_model": {}, "data_source": "gsm8k-tool"}
    assert environment.answer("reset", {"row": row}) == {"observation": None}
    call = {"name": "calculate", "arguments": {"expression": "6 * 7"}}
    assert environment.answer("call", call) == {"result": "42"}
    wrong = environment.answer("call", {"name": "calculate", "arguments": {"expression": "2 ** 9"}})
    assert "numbers" in wrong["error"]
    assert "error" in environment.answer("call", {"name": "calculate", "arguments": {"other": "1"}})
    assert environment.answer("reward", {}) == {"reward": None}
