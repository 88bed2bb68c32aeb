"""Tool calls in the policy's words, read as Hermes writes them or by one of vLLM's parsers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isotrain.errors import DataError, RolloutError


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Parsed:
    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""
    """The problem, where the policy tried to call and did not succeed."""
    spoken: str = ""
    """Its words without the calls, where there are such."""


Parser = Callable[[str], Parsed]

HERMES = "hermes"
# Whoever renders, compares or writes deeper values may run out of stack.
DEEPEST = 64
_OPENING, _CALL = "<tool_call>", re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)

# In a chat template: how it shows a call, and the parser that reads it. The first that fits is meant.
_SIGNS = (
    ("<function=", "qwen3_xml"),
    ("<tool_call>", HERMES),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
)


def parser_name(template: str) -> str:
    """The parser for models with this chat template."""
    for sign, name in _SIGNS:
        if sign in template:
            return name
    raise DataError(
        "tool_parser: the chat template does not show how tool calls are written; set "
        "the name of a tool parser of vLLM"
    )


def hermes(text: str) -> Parsed:
    """Calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Qwen's and Hermes' families.

    The last one may lack its closing tag. If one is malformed, none is made.
    """
    if _OPENING not in text:
        return Parsed()
    calls = []
    for closed, rest in _CALL.findall(text):
        try:
            call = json.loads(closed or rest)
            calls.append(as_call(call["name"], call["arguments"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            return Parsed(malformed=f"invalid tool call: {what}")
    return Parsed(tuple(calls), spoken=text.partition(_OPENING)[0])


def vllm_parser(name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> Parser:
    """A parser of vLLM, which has them for most families of models."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise RolloutError(
            f"tool_parser: '{name}' is a parser of vLLM, which cannot be imported "
            f"({error}); install it, or use a model whose calls are written as Hermes does"
        ) from error
    try:
        parser_class = ToolParserManager.get_tool_parser(name)
    except KeyError:
        raise RolloutError(f"tool_parser: vLLM has no tool parser '{name}'") from None
    try:
        request = ChatCompletionRequest(
            messages=[], model="policy", tools=[dict(tool) for tool in tools] or None
        )
    except ValueError as error:  # such as tools that are no functions
        raise DataError(f"the tool parser {name} does not take these tools: {error}") from error

    def parse(text: str) -> Parsed:
        try:
            parser = parser_class(tokenizer, list(request.tools or ()))
            extracted = parser.extract_tool_calls(text, request)
            opening = str(getattr(parser, "tool_call_start_token", "") or getattr(parser, "bot_token", ""))
            calls = tuple(
                as_call(call.function.name, call.function.arguments) for call in extracted.tool_calls
            )
            tried = opening and opening in text and not calls
            return Parsed(calls, "invalid tool call" if tried else "", extracted.content or "")
        except Exception as error:  # vLLM's parsers raise errors of any kind for what they cannot read
            return Parsed(malformed=f"invalid tool call: {error}")

    return parse


def as_call(name: Any, arguments: Any) -> ToolCall:
    """Raises `ValueError` for what cannot be called."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call needs a name and arguments by name")
    if problem := unusable(arguments):
        raise ValueError(problem)
    return ToolCall(name, arguments)


def unusable(value: Any) -> str:
    """Why a value that came as JSON could not be rendered, encoded or written again; empty if it could."""
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.keys()
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, float) and not math.isfinite(each):
                return f"{each} is not a number of JSON"
            elif isinstance(each, str) and not each.isascii():
                try:
                    each.encode()
                except UnicodeEncodeError:
                    return "a text has half of a surrogate pair"
        if not inner:
            return ""
        level = inner
    return f"it is nested more than {DEEPEST} levels deep"
