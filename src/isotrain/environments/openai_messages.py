"""Requests and replies of OpenAI's chat completions, as the values that isotrain works with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isotrain.environments.template import Message
from isotrain.environments.tool_calls import Parsed, unusable

MODEL = "policy"
"""The name of the only model; requests may name any."""

# They would change what the policy samples, and with it what it learns from.
_UNSUPPORTED = ("response_format", "logit_bias", "guided_json", "guided_regex", "structured_outputs")
# They would change what a reply says, and clients would take it for what they asked for.
_UNKNOWN_REPLIES = ("echo", "suffix", "best_of")
_NUMBER: tuple[tuple[type, ...], str] = (int, float), "a number"
_SWITCH: tuple[tuple[type, ...], str] = (bool,), "true or false"
# Also of fields that change nothing here: their values were meant otherwise.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "stream": _SWITCH,
    "stream_options": ((dict,), "an object"),
    "return_token_ids": _SWITCH,
    "logprobs": ((bool, int), "true, false or a whole number"),
    **dict.fromkeys(
        ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty"), _NUMBER
    ),
}
MOST_STOP_WORDS = 64
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Refused(Exception):
    """A call that gets no completion; `code` is OpenAI's word for why."""

    def __init__(self, message: str, code: str = "invalid_request_error", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class ChatRequest:
    messages: tuple[Message, ...]
    """As chat templates take them."""
    tools: tuple[Message, ...]
    max_tokens: int | None
    stop: tuple[str, ...]


@dataclass(frozen=True)
class Completion:
    """The policy's tokens and words of one call."""

    id: str
    prompt: Sequence[int]
    tokens: Sequence[int]
    logps: Sequence[float]
    decode: Callable[[Sequence[int]], str]
    text: str
    """Without the token that ended it, and without stop words."""
    parsed: Parsed
    finished: bool
    """Not cut at a limit."""


def read_body(data: bytes) -> dict[str, Any]:
    """The object of a request, all values of which can be rendered, encoded and written again."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object")
    if problem := unusable(body):
        raise Refused(f"the body cannot be used: {problem}")
    return body


def chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Raises `Refused` for what cannot be done."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages: a list with at least one message is needed")
    tools = [] if body.get("tools") is None else body["tools"]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("tools: a list of functions is needed")
    if body.get("tool_choice") == "none":
        tools = []
    names: dict[str, str] = {}
    return ChatRequest(
        tuple(_message(message, names) for message in messages), tuple(tools), *completion_limits(body)
    )


def completion_limits(body: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """Most tokens, and stop words; raises `Refused` for other wishes that cannot be done."""
    if body.get("n") not in (None, 1):
        raise Refused("n: one completion at a time; make several calls, each becomes a sequence of its own")
    for name in _UNSUPPORTED:
        if body.get(name) not in (None, {}, {"type": "text"}):
            raise Refused(f"{name} is not supported: it changes what the policy samples")
    for name in _UNKNOWN_REPLIES:
        if body.get(name) is True or body.get(name) not in (None, False, "", 1):
            raise Refused(f"{name} is not supported")
    for name, (kinds, needed) in _TYPES.items():
        value = body.get(name)
        if value is not None and (
            not isinstance(value, kinds) or (type(value) is bool and bool not in kinds)
        ):
            raise Refused(f"{name}: {needed} is needed")
    longest = None
    for name in ("max_tokens", "max_completion_tokens"):  # the second is the newer name
        value = body.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise Refused(f"{name}: a whole number above 0 is needed")
        longest = longest if value is None else value
    stop = body.get("stop")
    words = [] if stop in (None, "") else [stop] if isinstance(stop, str) else stop
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise Refused("stop: a text or a list of texts is needed")
    if len(words) > MOST_STOP_WORDS:
        raise Refused(f"stop: at most {MOST_STOP_WORDS} texts can be given")
    return longest, tuple(words)


def _message(message: Any, names: dict[str, str]) -> Message:
    """`names`: of the tools that were called so far, by the calls' ids; calls of this message are added."""
    role = _ROLES.get(str(message.get("role"))) if isinstance(message, dict) else None
    if role is None:
        raise Refused(f"messages: each needs a role; these are known: {', '.join(_ROLES)}")
    read: Message = {"role": role, "content": _text(message.get("content"))}
    if role == "tool":
        name = message.get("name") or names.get(str(message.get("tool_call_id")))
        if name is not None and not isinstance(name, str):
            raise Refused("messages: the name of a tool is a text")
        return {**read, "name": name} if name else read
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise Refused("messages: tool_calls are a list")
        read["tool_calls"] = [_call(call, names) for call in calls]
    return read


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise Refused("messages: only text is supported in contents")
    return "".join(part["text"] for part in parts)


def _call(call: Any, names: dict[str, str]) -> Message:
    try:
        name, arguments = call["function"]["name"], call["function"].get("arguments")
    except (TypeError, KeyError):
        name = arguments = None
    if not isinstance(name, str):
        raise Refused("messages: a tool call needs a function with a name and arguments")
    names[str(call.get("id"))] = name
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # the template then gets the text
            read = json.loads(arguments or "{}")
            arguments = arguments if unusable(read) else read
    return {
        "type": "function",
        "id": str(call.get("id")),
        "function": {"name": name, "arguments": arguments},
    }


def identity(message: Message) -> tuple[str, ...]:
    """Equal for a message and for what clients make of it when they send it back."""
    role, content = str(message["role"]), str(message["content"])
    if role != "assistant":
        return role, content
    calls = [
        json.dumps([call["function"]["name"], call["function"]["arguments"]], sort_keys=True)
        for call in message.get("tool_calls", ())
    ]
    return role, content.strip(), *calls


def assistant_message(completion: Completion) -> Message:
    """The message that the client gets, and sends back in its next call."""
    calls = [
        {
            "id": f"call_{completion.id.rpartition('-')[2]}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for number, call in enumerate(completion.parsed.calls)
    ]
    if not calls:
        return {"role": "assistant", "content": completion.text}
    return {"role": "assistant", "content": completion.parsed.spoken or None, "tool_calls": calls}


def sent_back(completion: Completion) -> Message:
    """The same message as it is read when it comes back."""
    return _message(assistant_message(completion), {})


def finish_reason(completion: Completion) -> str:
    if completion.parsed.calls:
        return "tool_calls"
    return "stop" if completion.finished else "length"


def usage(completion: Completion) -> dict[str, int]:
    read, wrote = len(completion.prompt), len(completion.tokens)
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


def chat_reply(completion: Completion, created: int, body: Mapping[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "message": assistant_message(completion),
        "finish_reason": finish_reason(completion),
        "logprobs": {"content": _logprobs(completion)} if body.get("logprobs") else None,
    }
    return _reply(completion, created, "chat.completion", choice, body)


def text_reply(completion: Completion, created: int, body: Mapping[str, Any]) -> dict[str, Any]:
    logprobs = None
    if body.get("logprobs") is not None:
        logprobs = {"tokens": _pieces(completion), "token_logprobs": list(completion.logps)}
    choice: dict[str, Any] = {
        "index": 0,
        "text": completion.text,
        "finish_reason": "stop" if completion.finished else "length",
        "logprobs": logprobs,
    }
    return _reply(completion, created, "text_completion", choice, body)


def _reply(
    completion: Completion, created: int, kind: str, choice: dict[str, Any], body: Mapping[str, Any]
) -> dict[str, Any]:
    reply = {"id": completion.id, "object": kind, "created": created, "model": MODEL, "choices": [choice]}
    if body.get("return_token_ids"):  # as vLLM's server has it
        choice["token_ids"] = list(completion.tokens)
        (choice if kind == "text_completion" else reply)["prompt_token_ids"] = list(completion.prompt)
    return {**reply, "usage": usage(completion)}


def _pieces(completion: Completion) -> list[str]:
    """The text of each token."""
    return [completion.decode([token]) for token in completion.tokens]


def _logprobs(completion: Completion) -> list[dict[str, Any]]:
    pairs = zip(_pieces(completion), completion.logps, strict=True)
    return [
        {"token": piece, "logprob": logp, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logp in pairs
    ]


def chunks(reply: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A reply as a stream has it: the beginning, what was written, the end, the count of tokens."""
    (choice,) = reply["choices"]
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    head = {key: reply[key] for key in ("id", "created", "model")}
    if reply["object"] == "text_completion":
        yield {**head, "object": "text_completion", "choices": [choice]}
    else:
        head["object"] = "chat.completion.chunk"
        message = dict(choice["message"])
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        rest = {key: choice[key] for key in ("logprobs", "token_ids") if choice.get(key) is not None}
        said = {"index": 0, "delta": message, "finish_reason": None, **rest}
        if "prompt_token_ids" in reply:
            head["prompt_token_ids"] = reply["prompt_token_ids"]
        yield {**head, "choices": [said]}
        end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
        yield {**head, "choices": [end]}
    if with_usage:
        yield {**head, "choices": [], "usage": reply["usage"]}
