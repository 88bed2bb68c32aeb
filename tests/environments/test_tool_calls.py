"""Tool calls are read as the engine that serves the model would read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from templates import tokenizer_with

from isotrain.environments.tool_calls import Parsed, ToolCall, hermes, parser_name, vllm_parser
from isotrain.errors import DataError, RolloutError

GOOD = [
    "just words",
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    'hm <tool_call>\n{"name": "add", "arguments": {"a": "ü", "b": [1, null]}}\n</tool_call> so',
    '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b", "arguments": {}}'
    "</tool_call>",
    '<tool_call>{"name": "open", "arguments": {"x": 2}}',
]
BAD = [
    '<tool_call>{"name": "add", </tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "add"}</tool_call>',
    "<tool_call>[1, 2]</tool_call>",
    "<tool_call></tool_call>",
    '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{</tool_call>',
]


@pytest.mark.parametrize("text", GOOD + BAD)
def test_hermes_as_vllm_reads_it(tiny: Path, text: str) -> None:
    pytest.importorskip("vllm")
    expected = vllm_parser("hermes", tokenizer_with(tiny / "model", "chatml"), [])(text)
    parsed = hermes(text)
    assert parsed.calls == expected.calls
    assert bool(parsed.malformed) == bool(expected.malformed) == (text in BAD)


def test_calls_and_what_is_wrong_with_them() -> None:
    assert hermes(GOOD[1]) == Parsed((ToolCall("add", {"a": 1}),))
    assert hermes("words") == Parsed()
    assert "'name' is missing" in hermes(BAD[1]).malformed
    deep: Any = "<tool_call>" + "[" * 100_000 + "</tool_call>"
    assert hermes(deep).malformed


def test_finds_the_tool_parser_of_a_template() -> None:
    assert parser_name("... <tool_call> ...") == "hermes"
    assert parser_name("<tool_call>\n<function=name>") == "qwen3_xml"
    assert parser_name("[TOOL_CALLS]") == "mistral"
    with pytest.raises(DataError, match="tool_parser"):
        parser_name("{{ messages }}")


def test_a_parser_that_vllm_does_not_have(tiny: Path) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(RolloutError, match="no tool parser 'nonsense'"):
        vllm_parser("nonsense", None, [])
