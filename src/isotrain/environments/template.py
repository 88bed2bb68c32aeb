"""The tokens that a chat template puts between two turns, without rendering the earlier ones again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from isotrain.errors import DataError

Message = dict[str, Any]

# Text that no template changes, and that stands nowhere else.
_SENTINEL = "Sentinel0"


class TurnTemplate:
    """A tokenizer's chat template, for conversations that go on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise DataError("episodes need a chat template, and the model's tokenizer has none")
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """The template has written the special tokens already."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """With special tokens."""
        text = self._tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def spoken(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        text = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
        """A conversation up to where the policy writes."""
        return self._render(messages, tools, add_generation_prompt=True)

    def between(
        self, ended_by: str, answers: Sequence[Message], tools: Sequence[Message] | None
    ) -> str | None:
        """All that stands between what the policy wrote and what it writes next; None if that is unknown.

        `ended_by` is the text of the token with which it ended its turn. What the template writes after an
        assistant's words is seen on a small conversation; the one at hand is not rendered.
        """
        question = {"role": "user", "content": "Question"}
        spoken = {"role": "assistant", "content": _SENTINEL}
        after = self._after_sentinel([question, spoken, *answers], tools)
        if after is None:  # some templates want to see the calls that tools answer
            after = self._after_calls(question, spoken, answers, tools)
        return None if after is None else after.removeprefix(ended_by)

    def _after_calls(
        self, question: Message, spoken: Message, answers: Sequence[Message], tools: Sequence[Message] | None
    ) -> str | None:
        names = [str(answer.get("name", "tool")) for answer in answers if answer["role"] == "tool"]
        calls = [
            {
                "type": "function",
                "id": f"call{i:05d}",
                "function": {"name": name, "arguments": {}},
            }
            for i, name in enumerate(names)
        ]
        replies = iter(calls)
        linked = [
            {**answer, "tool_call_id": next(replies)["id"]} if answer["role"] == "tool" else answer
            for answer in answers
        ]
        asked = {**spoken, "tool_calls": calls}
        plain = self._after_sentinel([question, spoken], tools, add_generation_prompt=False)
        called = self._after_sentinel([question, asked], tools, add_generation_prompt=False)
        answered = self._after_sentinel([question, asked, *linked], tools)
        if plain is None or called is None or answered is None or not answered.startswith(called):
            return None
        return plain + answered.removeprefix(called)

    def _after_sentinel(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        add_generation_prompt: bool = True,
    ) -> str | None:
        try:
            text = self._render(messages, tools, add_generation_prompt=add_generation_prompt)
        except DataError:
            return None
        _, sentinel, tail = text.partition(_SENTINEL)
        answered = [str(message["content"]) for message in messages[2:] if message["content"]]
        # A template that knows no tools leaves out what they answer.
        return tail if sentinel and all(content.strip() in tail for content in answered) else None

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, *, add_generation_prompt: bool
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program of its own
            raise DataError(f"the chat template refuses this conversation: {error}") from error
        assert isinstance(text, str)
        return text


class TextDigest:
    """Equal for texts that differ in white space alone, which templates trim around messages."""

    def __init__(self, text: str = "", before: TextDigest | None = None) -> None:
        self._hash: hashlib._Hash = hashlib.sha256() if before is None else before._hash.copy()
        self._hash.update("".join(text.split()).encode("utf-8", "surrogatepass"))

    def then(self, text: str) -> TextDigest:
        """The digest of this text with `text` behind it."""
        return TextDigest(text, self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextDigest) and self._hash.digest() == other._hash.digest()

    def __hash__(self) -> int:
        return hash(self._hash.digest())
