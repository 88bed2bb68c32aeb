"""Tokenizers trained on the spot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<s>",
    "</s>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
]
CORPUS = [
    "What is the capital of France? The answer is Paris, of course.",
    "user assistant system model helpful question answer think reasoning tool call",
    "I think that 12 plus 30 is 42. Yes, and the next one is easy too!\n\n- first\n- second\n",
    "def add(a, b):\n    return a + b\n",
] * 20


@pytest.fixture(scope="session")
def backends() -> dict[str, str]:
    """Serialised tokenizers: `bytes` splits as GPT-2 does, `metaspace` as SentencePiece models do."""
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    # Trimmed offsets are what Llama 3 has: they hide that a token begins with a space.
    byte_level.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()

    metaspace = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    to_spaces = decoders.Metaspace(prepend_scheme="first")
    metaspace.decoder = decoders.Sequence([decoders.ByteFallback(), to_spaces])
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]

    for backend, special, letters in (
        (byte_level, SPECIAL, alphabet),
        (metaspace, ["<unk>", *SPECIAL, *bytes_], []),
    ):
        trainer = trainers.BpeTrainer(
            vocab_size=900, special_tokens=special, initial_alphabet=letters, show_progress=False
        )
        backend.train_from_iterator(CORPUS, trainer)
    return {"bytes": byte_level.to_str(), "metaspace": metaspace.to_str()}


@pytest.fixture(scope="session")
def make_tokenizer(backends: dict[str, str]) -> Callable[..., Any]:
    def make(
        template: str | None, *, eos: str = "</s>", bos: str | None = None, kind: str = "bytes"
    ) -> PreTrainedTokenizerFast:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(backends[kind]), eos_token=eos, bos_token=bos
        )
        tokenizer.chat_template = template
        return tokenizer

    return make
