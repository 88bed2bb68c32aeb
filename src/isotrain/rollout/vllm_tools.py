"""vLLM's tool parsers, for the families of models that have one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from isotrain.errors import RolloutError


def tool_calls(name: str, tokenizer: Any, tools: Sequence[dict[str, Any]]) -> Callable[[str], Any]:
    """Reads what the policy wrote: names with arguments, whether it tried to call at all, and its words."""
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
    request = ChatCompletionRequest(messages=[], model="policy", tools=list(tools) or None)

    def parse(text: str) -> tuple[list[tuple[str, str]], bool, str]:
        parser = parser_class(tokenizer, list(request.tools or ()))
        extracted = parser.extract_tool_calls(text, request)
        calls = [(call.function.name, call.function.arguments) for call in extracted.tool_calls]
        opening = str(getattr(parser, "tool_call_start_token", "") or getattr(parser, "bot_token", ""))
        return calls, bool(opening) and opening in text, extracted.content or ""

    return parse
