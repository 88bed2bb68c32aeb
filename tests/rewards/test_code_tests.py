"""Tests for code in the forms of public data sets, and what counts as equal."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from isotrain.rewards.code import (
    CallTest,
    CodeTests,
    SourceTest,
    StdinTest,
    is_ready,
    last_block,
    make_job,
    passed_calls,
    read_results,
    read_tests,
    same_output,
    same_value,
)

PAIRS = {"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", ["4", "6"]]}
HUMAN_EVAL = "def check(candidate):\n    assert candidate(1) == 2\n"


@pytest.mark.parametrize(
    ("answer", "row", "expected"),
    [
        (PAIRS, {}, CodeTests((StdinTest("1\n", "2\n"), StdinTest("2\n3", "4\n6")))),
        (json.dumps(PAIRS), {}, CodeTests((StdinTest("1\n", "2\n"), StdinTest("2\n3", "4\n6")))),
        ({**PAIRS, "fn_name": None}, {}, CodeTests((StdinTest("1\n", "2\n"), StdinTest("2\n3", "4\n6")))),
        (
            {"inputs": [[1, [2]], ["a"]], "outputs": [3, ["b"]], "fn_name": "f"},
            {},
            CodeTests((CallTest("f", (1, [2]), 3), CallTest("f", ("a",), ["b"]))),
        ),
        (
            {"inputs": [[1], [2]], "outputs": [[2], [[4]]], "fn_name": "f"},
            {},
            CodeTests((CallTest("f", (1,), [2], wrapped=True), CallTest("f", (2,), [[4]], wrapped=True))),
        ),
        (
            {"inputs": ['[1, 2]\n"x"'], "outputs": ["[3]"], "fn_name": "f"},
            {},
            CodeTests((CallTest("f", ([1, 2], "x"), [3]),)),
        ),
        (
            '[{"input": "1", "output": "2", "testtype": "stdin"}]',
            {},
            CodeTests((StdinTest("1", "2"),)),
        ),
        (
            [{"input": "1\n2", "output": "3", "testtype": "functional"}],
            {"metadata": '{"func_name": "add"}'},
            CodeTests((CallTest("add", (1, 2), 3),)),
        ),
        (
            ["assert f(1) == 2"],
            {"test_setup_code": "import math", "test_imports": ["import re"]},
            CodeTests((SourceTest("assert f(1) == 2"),), "import math\nimport re"),
        ),
        (
            {"test_list": ["assert f(1) == 2"], "test_setup_code": "import math"},
            {},
            CodeTests((SourceTest("assert f(1) == 2"),), "import math"),
        ),
        (
            HUMAN_EVAL,
            {"entry_point": "f"},
            CodeTests((SourceTest(f"{HUMAN_EVAL}\n\ncheck(f)\n"),)),
        ),
        (
            {"test": HUMAN_EVAL, "entry_point": "f"},
            {},
            CodeTests((SourceTest(f"{HUMAN_EVAL}\n\ncheck(f)\n"),)),
        ),
    ],
)
def test_reads_every_form_of_tests(answer: Any, row: dict[str, Any], expected: CodeTests) -> None:
    assert read_tests(answer, row) == expected


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "",
        "42",
        42,
        [],
        {},
        [1],
        ["a", 1],
        {"inputs": [], "outputs": []},
        HUMAN_EVAL,
        {"test_list": []},
        "[" * 9999,
    ],
)
def test_refuses_rows_without_tests(answer: Any) -> None:
    with pytest.raises(
        ValueError, match=r"the row has no tests; check reward\.answer_key, which may hold \{inputs"
    ):
        read_tests(answer, {})


def test_pairs_that_are_none() -> None:
    with pytest.raises(ValueError, match="2 inputs and 1 outputs"):
        read_tests({"inputs": ["1", "2"], "outputs": ["1"]}, {})


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2  \r\n3\n\n", " 1 2\n3", True),
        ("1.0 2", "1 2.00", True),
        ("yes\n1e3", "yes\n1000", True),
        ("1 2", "1\n2", False),
        ("Yes", "yes", False),
        ("1.0000001", "1", False),
        ("", "0", False),
        ("", "", True),
        ("1\n2\n3", "1\n2", False),
        ("sNaN", "1", False),
        ("nan", "nan", True),
        ("nan", "NaN", False),
        ("1_000", "1000", False),
        ("١٢", "12", False),
        ("1e9999999999999999999", "1e9999999999999999998", False),
    ],
)
def test_equal_output(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        (3, 3, True),
        (3, 3.0, True),  # JSON has one kind of number
        (3.0000001, 3, False),
        (2**63 + 1, float(2**63), False),
        (True, 1, False),
        (1, True, False),
        (0, False, False),
        (None, False, False),
        ("1", 1, False),
        (1, "1", False),
        (True, True, True),
        ([3], 3, False),
        (3, [3], False),
        ([3], [3], True),
        ([1, 2], [1], False),
        ([2, 1], [1, 2], False),
        ([1, 2], (1, 2), True),  # nor tuples
        ([[True]], [[1]], False),
        ([float("nan")], [float("nan")], True),
        (float("nan"), 0, False),
        ({"a": [1]}, {"a": [1.0]}, True),
        ({"a": True}, {"a": 1}, False),
        ({"1": 2}, {1: 2}, True),  # nor keys that are no text
        ({"a": 1, "b": None}, {"a": 1}, False),
        ([], {}, False),
        ("", None, False),
        ("ab", ["a", "b"], False),
    ],
)
def test_equal_values(returned: Any, expected: Any, same: bool) -> None:
    assert same_value(returned, expected) is same


@pytest.mark.parametrize(
    ("returned", "outputs", "passed"),
    [
        ([5, 6], [[5], [6]], {0, 1}),  # APPS wraps all results of some rows
        ([[5], [6]], [[5], [6]], {0, 1}),  # and there is no telling that they are not lists
        ([5, [6]], [[5], [6]], {1}),  # but a solution cannot have it both ways
        ([5, [6]], [5, [6]], {0, 1}),
        ([5, 6], [5, [6]], {0}),  # a row with a result that is no list wraps none
        ([[5], 6], [5, [6]], set()),
        ([5], ["[5]"], set()),  # LiveCodeBench's JSON is never wrapped
        ([[5]], ["[5]"], {0}),
    ],
)
def test_a_result_may_be_in_a_list_of_one(returned: list[Any], outputs: list[Any], passed: set[int]) -> None:
    row = {"inputs": [[1]] * len(outputs), "outputs": outputs, "fn_name": "f"}
    if isinstance(outputs[0], str):
        row = {**row, "inputs": ["1"]}
    tests = {i: test for i, test in enumerate(read_tests(row, {}).tests) if isinstance(test, CallTest)}
    assert passed_calls(dict(enumerate(returned)), tests) == passed


@pytest.mark.parametrize(
    ("response", "block"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("first\n```python\na\n```\nthen\n```py\nb\nc\n```\nend", "b\nc"),
        ("```\na\n```", "a"),
        ("  ```python\n  a\n  ```", "  a"),
        ("````\n```\na\n```\n````", "```\na\n```"),
        ("```python\na\n```\n```python\ntruncated", "a"),
        ("```python\n```", ""),
        ("a = 1", None),
        ("```python\nnever closed", None),
        ("in `` ```a``` `` line", None),
        ("", None),
    ],
)
def test_the_last_closed_block_is_the_code(response: str, block: str | None) -> None:
    assert last_block(response) == block


@pytest.mark.parametrize("piece", ["```py\n", "`", "```\n", "``` ", "\n"])
def test_no_text_takes_long_to_read(piece: str) -> None:
    begun = time.monotonic()
    last_block(piece * 200_000)
    assert time.monotonic() - begun < 10


def test_results_are_those_with_the_word() -> None:
    _, word = make_job("", "", [])
    lines = [
        "[0, 1]",
        f"{word} [0, [1, 2]]",
        f"{word}",
        f"{word} x",
        f"{word} [1]",
        f"x{word} [2, 2]",
        f"{word} 7",
    ]
    assert read_results("\n".join([*lines, f'{word} ["a", 1]', f"{word} [3, null]"]), word) == {
        0: [1, 2],
        3: None,
    }
    assert make_job("", "", [])[1] != word
    assert is_ready(f"{word} ready\n{word} [0, true]\n", word) and not is_ready(
        f"ready\n{word} ready\n", word
    )
