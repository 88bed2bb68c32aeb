"""A conversation with a model in the terminal, token by token.

P: prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from isotrain.data.chat import ChatTemplate, encode_prompt_text
from isotrain.data.formats import ChatMessage, ChatRow
from isotrain.data.trajectory import sample_seed
from isotrain.device.detect import choose_device
from isotrain.errors import RolloutError
from isotrain.models.config import positions
from isotrain.models.files import load_tokenizer
from isotrain.models.load import read_config
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.hf import HfEngine

# What a decoder writes for bytes of a character that is not whole yet.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Chat:
    """Keeps what was said; without a chat template, each line is continued as plain text."""

    def __init__(self, directory: Path, *, device: str, dtype: str, sampling: Sampling, seed: int) -> None:
        self.tokenizer = load_tokenizer(directory)
        self._template = ChatTemplate(self.tokenizer) if self.tokenizer.chat_template else None
        self._engine = HfEngine(
            directory, name="engine", dtype=dtype, device=choose_device(device).activate(0)
        )
        self._limit = positions(read_config(directory)).limit
        self._sampling, self._seed = sampling, seed
        self.messages: list[ChatMessage] = []
        self._turn = 0

    def reply(self, text: str) -> Iterator[str]:
        """Pieces of the model's reply as it writes them. It is part of the conversation from then on."""
        asked = [*self.messages, ChatMessage("user", text)]
        prompt_P = self._encode(asked)
        room = self._sampling.max_tokens
        if self._limit is not None:
            room = min(room, self._limit - len(prompt_P))
        if room < 1:
            raise RolloutError(
                f"the conversation has {len(prompt_P):,} tokens, the model takes {self._limit:,}: /clear it"
            )
        self._turn += 1
        seed = sample_seed(self._seed, self._turn, 0)
        request = Request(0, self._turn, 0, seed, prompt_P, room)
        pieces = []
        for piece in text_pieces(self._engine.stream(request, self._sampling), self._decode):
            pieces.append(piece)
            yield piece
        self.messages = [*asked, ChatMessage("assistant", "".join(pieces))]

    def close(self) -> None:
        self._engine.close()

    def _encode(self, messages: Sequence[ChatMessage]) -> npt.NDArray[np.int32]:
        if self._template is None:
            return np.array(encode_prompt_text(self.tokenizer, str(messages[-1].content)), np.int32)
        return self._template.encode_prompt(ChatRow(tuple(messages)))

    def _decode(self, tokens: Sequence[int]) -> str:
        return decoded(self.tokenizer, tokens)


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    text = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def text_pieces(tokens: Iterator[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """What each token adds to the text; a character of several tokens comes when it is whole."""
    written: list[int] = []
    shown = ""
    for token in tokens:
        written.append(token)
        text = decode(written)
        if not text.endswith(_UNFINISHED) and len(text) > len(shown):
            yield text[len(shown) :]
            shown = text
    if (text := decode(written)) != shown:
        yield text[len(shown) :]
