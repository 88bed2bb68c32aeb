"""Conversations and plain texts as token ids, with the exact loss mask.

T: tokens of one sample.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from isotrain.data.formats import ChatRow, Text
from isotrain.data.items import Sample
from isotrain.errors import DataError

_OPENING = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_CLOSING = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
# Private-use characters: they have no meaning in any text, and no template trims them.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"

_COMPARED_ENCODINGS = 32
_REMEDY = (
    "put {% generation %} and {% endgeneration %} around the assistant's text in the tokenizer's chat "
    "template, or use rows with plain prompt and completion strings"
)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: Text) -> Sample:
    """The prompt without loss, then the completion and the end-of-text token with loss.

    Prompt and completion are tokenised apart: at inference the model gets the ids of the prompt alone, and a
    merge across the boundary would teach it to continue ids that it never sees.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError("the tokenizer has no end-of-text token (eos_token), so completions would never end")
    prompt = encode_prompt_text(tokenizer, text.prompt)
    completion = list(tokenizer(text.completion, add_special_tokens=False, verbose=False)["input_ids"])
    if completion[-1:] != [end]:
        completion.append(end)
    mask = [False] * len(prompt) + [True] * len(completion)
    return Sample(np.array(prompt + completion, np.int32), np.array(mask, np.bool_))


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The one special token with which the chat template ends an assistant's turn; None if there is none."""
    if not tokenizer.chat_template or not tokenizer.is_fast:
        return None
    try:
        return ChatTemplate(tokenizer).end_of_turn
    except DataError:
        return None


def end_tokens(model_ends: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All tokens with which a model may end a response.

    These are the model's own, the one that SFT teaches after plain completions and the one that it teaches
    after turns: a base model that was trained on conversations has learnt an end that its configuration does
    not know.
    """
    taught = (tokenizer.eos_token_id, end_of_turn(tokenizer))
    ends = [*model_ends, *(int(end) for end in taught if end is not None)]
    return tuple(dict.fromkeys(ends))


def closing_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens after the assistant's last words: the end of the turn, and all that the template adds."""
    if not tokenizer.chat_template:
        return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    words = "isotrain"
    turns = [{"role": "user", "content": words}, {"role": "assistant", "content": words}]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    return list(tokenizer(text[text.rindex(words) + len(words) :], add_special_tokens=False)["input_ids"])


def encode_prompt_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a text that continues: without the end token that some tokenizers add."""
    end = tokenizer.eos_token_id
    plain = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    prompt = list(tokenizer(text, verbose=False)["input_ids"])
    while len(prompt) > len(plain) and prompt[-1] == end and plain[-1:] != [end]:
        prompt.pop()
    return prompt


class NotExact(Exception):
    """Why one message has no exact mask."""


@dataclass(frozen=True)
class _Rendering:
    """A rendered conversation and its tokens, with the characters that each token stands for."""

    text: str
    tokens_T: npt.NDArray[np.int32]
    starts_T: npt.NDArray[np.int64]
    ends_T: npt.NDArray[np.int64]
    special_T: npt.NDArray[np.bool_]

    def between(self, start: int, end: int) -> range:
        """The tokens of a stretch of characters; a token that is only partly inside makes it inexact."""
        for bound in (start, end):
            straddling = np.flatnonzero((self.starts_T < bound) & (bound < self.ends_T))
            if len(straddling):
                token = self.text[self.starts_T[straddling[0]] : self.ends_T[straddling[-1]]]
                raise NotExact(f"its boundary is inside the token {token!r}")
        inside = np.flatnonzero((self.starts_T >= start) & (self.starts_T < end) & (self.ends_T <= end))
        return range(inside[0], inside[-1] + 1) if len(inside) else range(0)

    def is_blank(self, token: int) -> bool:
        return not self.text[self.starts_T[token] : self.ends_T[token]].strip()

    def first_special(self, start: int) -> int | None:
        """The first special token that begins at or after a character."""
        specials = np.flatnonzero(self.special_T & (self.starts_T >= start))
        return int(specials[0]) if len(specials) else None


@dataclass(frozen=True)
class _Chat:
    """A conversation as the template gets it, or its first messages."""

    tokenizer: PreTrainedTokenizerBase
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None

    def first(self, count: int) -> _Chat:
        return replace(self, messages=self.messages[:count])

    def render(self, **options: Any) -> str:
        text = self.tokenizer.apply_chat_template(self.messages, tools=self.tools, tokenize=False, **options)
        assert isinstance(text, str)
        return text

    def try_render(self, **options: Any) -> str | None:
        """For parts and variants of conversations, which a template may refuse, or which may be empty."""
        try:
            return self.render(**options)
        except Exception:  # a template is a program of its own; one that fails is one derivation less
            return None

    def content_span(self, number: int, text: str, **options: Any) -> tuple[int, int] | None:
        """Where a message's content stands in `text`, which this conversation was rendered to.

        Rendered again with a sentinel in its place, all before and after the sentinel must be there in the
        original too, and what is left of the original must come from the content.
        """
        content = self.messages[number]["content"]
        if not isinstance(content, str):
            return None
        sentinel = "Sentinel0"
        while sentinel in text:
            sentinel += "0"
        messages = list(self.messages)
        messages[number] = {**messages[number], "content": sentinel}
        other = replace(self, messages=messages).try_render(**options)
        if other is None or other.count(sentinel) != 1:
            return None
        head, tail = other.split(sentinel)
        start, end = len(head), len(text) - len(tail)
        if start > end or not text.startswith(head) or not text.endswith(tail):
            return None
        return (start, end) if text[start:end] in content else None


class ChatTemplate:
    """A tokenizer's chat template, and which tokens of a conversation the model generates."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise DataError("exact masks need a fast tokenizer, and this one has no tokenizer.json")
        self.tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special.update(tokenizer.all_special_ids)
        self._backend = _without_post_processor(tokenizer)
        self._compared = 0

    def encode(self, conversation: ChatRow) -> Sample:
        """Ids as `apply_chat_template` gives them, and the mask of the assistant's messages."""
        chat = _Chat(self.tokenizer, [m.as_dict() for m in conversation.messages], conversation.tools)
        try:
            text = chat.render()
        except Exception as error:  # as in `try_render`, but without this one there is no sample
            raise DataError(f"the chat template refuses this conversation: {error}") from error
        rendering = self._tokenise(text)
        assistants = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        turns = [i for i in assistants if i >= conversation.loss_from]
        template = self.tokenizer.get_chat_template(tools=conversation.tools)
        if _OPENING.search(template):
            ranges = _marked(chat, template, rendering, assistants, turns)
        else:
            ranges = [self._derived(chat, rendering, turn) for turn in turns]
        mask_T = np.zeros(len(rendering.tokens_T), np.bool_)
        for tokens in ranges:
            mask_T[tokens.start : tokens.stop] = True
        return Sample(rendering.tokens_T, mask_T)

    def encode_prompt(self, conversation: ChatRow) -> npt.NDArray[np.int32]:
        """Ids of a conversation up to where the assistant's response begins."""
        chat = _Chat(self.tokenizer, [m.as_dict() for m in conversation.messages], conversation.tools)
        try:
            text = chat.render(add_generation_prompt=True)
        except Exception as error:  # as in `encode`
            raise DataError(f"the chat template refuses this prompt: {error}") from error
        return self._tokenise(text).tokens_T

    def _tokenise(self, text: str) -> _Rendering:
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids = encoding.ids
        if self._compared < _COMPARED_ENCODINGS:
            self._compared += 1
            expected = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if ids != expected:
                raise DataError("the tokenizer's Python class and its tokenizer.json give different ids")
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        special = np.fromiter((i in self._special for i in ids), np.bool_, len(ids))
        for token in np.flatnonzero(special):
            # Special tokens may swallow the white space around them, which is not what they stand for.
            piece = text[starts[token] : ends[token]]
            starts[token] += len(piece) - len(piece.lstrip())
            ends[token] -= len(piece) - len(piece.rstrip())
        return _Rendering(text, np.array(ids, np.int32), starts, ends, special)

    def _derived(self, chat: _Chat, rendering: _Rendering, turn: int) -> range:
        """The tokens of one assistant message, from what the template renders without it and with it."""
        text = rendering.text
        before = chat.first(turn).try_render(add_generation_prompt=True)
        after = text if turn + 1 == len(chat.messages) else chat.first(turn + 1).try_render()
        if before is not None and not text.startswith(before):
            before = None
        if after is not None and not text.startswith(after):
            after = None
        try:
            if before is not None and after is not None and len(before) <= len(after):
                return self._between(rendering, len(before), len(after), chat.messages[turn])
            return self._located(chat, rendering, turn, before)
        except NotExact as reason:
            raise DataError(
                f"the chat template gives no exact mask for message {turn} (assistant): {reason}; {_REMEDY}"
            ) from None

    def _between(self, rendering: _Rendering, start: int, end: int, message: dict[str, Any]) -> range:
        """A rendered message's tokens up to the special token that ends the turn, or all if none does.

        A message closes with special tokens and white space. The model stops at the first of these special
        tokens, so what the template writes after it (mostly a newline) is not the model's.
        """
        tokens = rendering.between(start, end)
        closing: list[int] = []
        for token in reversed(tokens):
            if rendering.special_T[token]:
                closing.insert(0, token)
            elif not rendering.is_blank(token):
                break
        if not closing:
            if self.end_of_turn is not None:
                raise NotExact("the template writes text after its end-of-turn token")
            return tokens
        if message.get("tool_calls"):
            # Calls may be closed by special tokens of their own; the turn ends after all of them.
            return range(tokens.start, closing[-1] + 1)
        content = message["content"] if isinstance(message["content"], str) else ""
        for token in closing:
            # Content that itself ends with the text of a special token is not the end of the turn yet.
            if rendering.text[start : rendering.starts_T[token]].rstrip().endswith(content.rstrip()):
                return range(tokens.start, token + 1)
        return range(tokens.start, closing[0] + 1)

    def _located(self, chat: _Chat, rendering: _Rendering, turn: int, before: str | None) -> range:
        """For templates that render a message differently once others follow: find its content itself.

        Examples: reasoning that is stripped from earlier turns, or a system prompt that moves into the last
        question.
        """
        text, message = rendering.text, chat.messages[turn]
        content = chat.content_span(turn, text)
        if before is not None and (content is not None or not message["content"]):
            start = len(before)
        elif content is not None:
            start = _generation_start(chat, text, turn, content[0])
        else:
            raise NotExact("the template changes, repeats or leaves out its content")
        content_start, content_end = content if content is not None else (start, start)
        if start > content_start:
            raise NotExact("the template writes its content before the generation prompt")
        closing = rendering.first_special(content_end)
        if closing is None or self.end_of_turn != rendering.tokens_T[closing]:
            raise NotExact("no end-of-turn token follows its content")
        end_of_turn = text[rendering.starts_T[closing] : rendering.ends_T[closing]]
        between = text[content_end : rendering.starts_T[closing]].strip()
        if message.get("tool_calls"):
            if end_of_turn in json.dumps(message["tool_calls"], ensure_ascii=False, default=str):
                raise NotExact(f"its tool calls contain {end_of_turn!r}")
        elif between:
            raise NotExact(f"{between[:40]!r} stands between its content and the end-of-turn token")
        return rendering.between(start, int(rendering.ends_T[closing]))

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token that the template puts after an assistant's message, seen on a small example."""
        messages = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Sentinel"}]
        text = _Chat(self.tokenizer, messages).try_render()
        if text is None or text.count("Sentinel") != 1:
            return None
        rendering = self._tokenise(text)
        end = text.index("Sentinel") + len("Sentinel")
        token = rendering.first_special(end)
        if token is None or text[end : rendering.starts_T[token]].strip():
            return None
        return int(rendering.tokens_T[token])


def _marked(
    chat: _Chat, template: str, rendering: _Rendering, assistants: list[int], turns: list[int]
) -> list[range]:
    """The template's own generation markers, read as characters that they write into the rendering.

    `return_assistant_tokens_mask` of transformers counts characters instead, which goes wrong inside macros,
    and it rounds straddling tokens in. What is inserted begins and ends with a block tag, as the markers
    do, so that Jinja trims the same white space around it.
    """
    marked = _OPENING.sub(rf"{{%\1 generation %}}{{% if true %}}{_OPEN}{{% endif \2%}}", template)
    marked = _CLOSING.sub(rf"{{%\1 if true %}}{_CLOSE}{{% endif %}}{{% endgeneration \2%}}", marked)
    pieces = re.split(f"([{_OPEN}{_CLOSE}])", chat.render(chat_template=marked))
    if "".join(pieces[::2]) != rendering.text or pieces[1::2] != [_OPEN, _CLOSE] * (len(pieces) // 4):
        raise DataError("the chat template changes what its generation markers enclose, or nests them")
    bounds = np.cumsum([len(piece) for piece in pieces[::2]]).tolist()
    spans = list(zip(bounds[0:-1:2], bounds[1::2], strict=True))
    if turns != assistants:
        if len(spans) != len(assistants):
            raise DataError(
                "the chat template's generation markers do not enclose each assistant message once, "
                "so the mask of the completion is unknown"
            )
        spans = [span for number, span in zip(assistants, spans, strict=True) if number in turns]
    try:
        return [rendering.between(start, end) for start, end in spans]
    except NotExact as reason:
        raise DataError(f"the chat template's generation markers are not exact: {reason}") from None


def _generation_start(chat: _Chat, text: str, turn: int, content: int) -> int:
    """Where the content begins, or the white space that the template writes before it.

    That white space is the model's to generate unless the generation prompt has it, which is seen by
    comparing what follows the message before in both renderings.
    """
    prompt = chat.first(turn).try_render(add_generation_prompt=True)
    if prompt is None:
        return content
    here = chat.content_span(turn - 1, text)
    there = chat.first(turn).content_span(turn - 1, prompt, add_generation_prompt=True)
    if here is None or there is None or not text.startswith(prompt[there[1] :], here[1]):
        return content
    start = here[1] + len(prompt) - there[1]
    return start if start <= content and not text[start:content].strip() else content


def _without_post_processor(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of the tokenizer whose offsets are whole.

    Post-processors cut white space off the offsets of tokens, which would hide that a token straddles a
    boundary. They add special tokens too, but a chat template has written those already.
    """
    specification = json.loads(tokenizer.backend_tokenizer.to_str())
    specification.update(post_processor=None, truncation=None, padding=None)
    return Tokenizer.from_str(json.dumps(specification))
