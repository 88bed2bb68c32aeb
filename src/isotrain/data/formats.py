"""Rows of the usual data set shapes as conversations or plain texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from isotrain.data.rows import Row
from isotrain.errors import DataError

Format = Literal["auto", "messages", "prompt-completion", "text", "sharegpt", "alpaca"]

_SHAPES = """the supported formats are
  {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
  {"prompt": "...", "completion": "..."}   (strings, or lists of messages)
  {"text": "..."}
  {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
  {"instruction": "...", "input": "...", "output": "..."}
or any other two columns named by data.prompt_key and data.completion_key"""

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}

# For tokenizers without a chat template: the two prompts that the Alpaca data set was published with.
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


_MISSING = object()


@dataclass(frozen=True)
class ChatMessage:
    role: str
    content: str | list[Any] | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys that chat templates know, such as `tool_calls` or `reasoning_content`."""

    def as_dict(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True)
class ChatRow:
    messages: tuple[ChatMessage, ...]
    tools: list[Any] | None = None
    loss_from: int = 0
    """Assistant messages before this one are part of the prompt: no loss is taken on them."""


@dataclass(frozen=True)
class Text:
    prompt: str
    completion: str


@dataclass(frozen=True)
class ColumnNames:
    """Where the two halves of a prompt-completion row are, and whether a chat template is there for them."""

    prompt_key: str = "prompt"
    completion_key: str = "completion"
    has_template: bool = True

    @property
    def chosen(self) -> bool:
        return (self.prompt_key, self.completion_key) != ("prompt", "completion")


def detect(row: Row, columns: ColumnNames) -> Format:
    """The format of a data set, from the columns of its first row."""
    values = row.values
    if columns.chosen:
        return "prompt-completion"
    if "messages" in values:
        return "messages"
    if "conversations" in values:
        return "sharegpt"
    if "prompt" in values and "completion" in values:
        return "prompt-completion"
    if "instruction" in values and "output" in values:
        return "alpaca"
    if "text" in values:
        return "text"
    hint = ""
    if isinstance(info := values.get("extra_info"), dict) and {"question", "answer"} <= set(info):
        hint = "\nfor this one: data.prompt_key=extra_info.question data.completion_key=extra_info.answer"
    raise DataError(f"{row.origin}: no known format has the columns {_named(values)}; {_SHAPES}{hint}")


def normalise(row: Row, format: Format, columns: ColumnNames) -> ChatRow | Text:
    """The meaning of one row of a known format; a row that does not fit is an error that names it."""
    conversation = _READERS[format](row, columns)
    if isinstance(conversation, ChatRow):
        if not columns.has_template:
            raise DataError(
                f"{row.origin}: the row is a conversation, but the tokenizer has no chat template; "
                "use a model that has one, or rows with plain prompt and completion strings"
            )
        if not any(m.role == "assistant" for m in conversation.messages[conversation.loss_from :]):
            raise DataError(f"{row.origin}: no assistant message to learn from; add one or remove the row")
    return conversation


def prompt_of(row: Row, key: str, has_template: bool) -> ChatRow | str:
    """A prompt without a response: a list of messages, or a string, which is one question to chat models."""
    prompt = _at(row, key)
    if isinstance(prompt, str) and not has_template:
        return prompt
    messages = _side(row, prompt, key, "user")
    if not has_template:
        raise DataError(
            f"{row.origin}: '{key}' is a conversation, but the tokenizer has no chat template; "
            "use a model that has one, or plain strings as prompts"
        )
    if messages[-1].role == "assistant":
        raise DataError(
            f"{row.origin}: '{key}' ends with an assistant message; remove the response from the prompt"
        )
    return ChatRow(messages, _tools(row))


def _from_prompt_completion(row: Row, columns: ColumnNames) -> ChatRow | Text:
    prompt, completion = _at(row, columns.prompt_key), _at(row, columns.completion_key)
    strings = isinstance(prompt, str) and isinstance(completion, str)
    if strings and not (columns.chosen and columns.has_template):
        return Text(prompt, completion)
    before = _side(row, prompt, columns.prompt_key, "user")
    after = _side(row, completion, columns.completion_key, "assistant")
    return ChatRow(before + after, _tools(row), loss_from=len(before))


def _side(row: Row, value: Any, key: str, role: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage(role, value),) if isinstance(value, str) else _messages(row, key)


def _from_sharegpt(row: Row, columns: ColumnNames) -> ChatRow:
    messages = []
    for number, turn in enumerate(_list(row, "conversations")):
        where = f"{row.origin}: conversations[{number}]"
        if isinstance(turn, dict) and "role" in turn:  # a common mixture of the two shapes
            messages.append(_message(turn, where))
            continue
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise DataError(f'{where} must be {{"from": "human", "value": "..."}}, not {_shown(turn)}')
        if (role := _SHAREGPT_ROLES.get(str(turn.get("from")))) is None:
            raise DataError(f"{where} is from '{turn.get('from')}'; use {', '.join(_SHAREGPT_ROLES)}")
        messages.append(ChatMessage(role, turn["value"]))
    return ChatRow(_system(row) + tuple(messages), _tools(row))


def _from_alpaca(row: Row, columns: ColumnNames) -> ChatRow | Text:
    instruction, output = _string(row, "instruction"), _string(row, "output")
    extra = _string(row, "input") if row.values.get("input") is not None else ""
    if not columns.has_template:
        if row.values.get("history") or row.values.get("system"):
            raise DataError(f"{row.origin}: history and system need a tokenizer with a chat template")
        prompt = _ALPACA_WITH_INPUT if extra else _ALPACA_WITHOUT_INPUT
        return Text(prompt.format(instruction=instruction, input=extra), output)
    before = list(_system(row))
    for number, pair in enumerate(row.values.get("history") or ()):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(side, str) for side in pair):
            raise DataError(f"{row.origin}: history[{number}] must be [question, answer], not {_shown(pair)}")
        before += [ChatMessage("user", pair[0]), ChatMessage("assistant", pair[1])]
    asked = ChatMessage("user", f"{instruction}\n\n{extra}" if extra else instruction)
    return ChatRow((*before, asked, ChatMessage("assistant", output)))


_READERS: dict[str, Callable[[Row, ColumnNames], ChatRow | Text]] = {
    "messages": lambda row, columns: ChatRow(_messages(row, "messages"), _tools(row)),
    "prompt-completion": _from_prompt_completion,
    "text": lambda row, columns: Text("", _string(row, "text")),
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
}


def value_at(values: Mapping[str, Any], key: str, missing: Any = None) -> Any:
    """The value at a dotted path; a column whose own name has the dots wins."""
    if key in values:
        return values[key]
    value: Any = values
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return missing
        value = value[part]
    return value


def _at(row: Row, key: str) -> Any:
    if (value := value_at(row.values, key, _MISSING)) is not _MISSING:
        return value
    inside: Any = row.values
    for part in key.split("."):
        if not isinstance(inside, Mapping) or part not in inside:
            break
        inside = inside[part]
    state = f"has {_named(inside)}" if isinstance(inside, Mapping) else f"is {_shown(inside)}"
    where = "the row" if inside is row.values else f"what stands before '{part}'"
    raise DataError(f"{row.origin}: no '{key}': {where} {state}")


def _string(row: Row, key: str) -> str:
    value = _at(row, key)
    if not isinstance(value, str):
        raise DataError(f"{row.origin}: '{key}' must be a string, not {_shown(value)}")
    return value


def _list(row: Row, key: str) -> list[Any]:
    value = _at(row, key)
    if not isinstance(value, list) or not value:
        raise DataError(f"{row.origin}: '{key}' must be a list of messages, not {_shown(value)}")
    return value


def _messages(row: Row, key: str) -> tuple[ChatMessage, ...]:
    return tuple(_message(m, f"{row.origin}: {key}[{number}]") for number, m in enumerate(_list(row, key)))


def _message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise DataError(f'{where} must be {{"role": "user", "content": "..."}}, not {_shown(value)}')
    extra = {key: item for key, item in value.items() if key not in ("role", "content") and item is not None}
    content = value.get("content")
    if content is None and not extra:
        raise DataError(f"{where} has no content")
    if content is not None and not isinstance(content, (str, list)):
        raise DataError(f"{where}.content must be a string, not {_shown(content)}")
    return ChatMessage(value["role"], content, extra)


def _system(row: Row) -> tuple[ChatMessage, ...]:
    return (ChatMessage("system", _string(row, "system")),) if row.values.get("system") else ()


def _tools(row: Row) -> list[Any] | None:
    tools = row.values.get("tools")
    if isinstance(tools, str) and tools.strip():  # Parquet has no column type for tool schemas but text
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"{row.origin}: 'tools' is not JSON: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise DataError(f"{row.origin}: 'tools' must be a list of tool schemas, not {_shown(tools)}")
    return tools


def _named(columns: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in columns) or "(none)"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
