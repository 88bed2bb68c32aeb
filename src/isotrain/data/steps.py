"""Solutions as steps, as a process reward model reads them in training and in scoring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from isotrain.data.sample import Sample
from isotrain.errors import DataError


def separator_tokens(tokenizer: PreTrainedTokenizerBase, separator: str, field: str) -> list[int]:
    """`field` is the recipe field of the separator."""
    tokens = list(tokenizer(separator, add_special_tokens=False)["input_ids"])
    if not tokens:
        raise DataError(f"{field} has no token, so steps would have no end; set another text")
    return tokens


def single_token(tokenizer: PreTrainedTokenizerBase, text: str, field: str) -> int:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise DataError(f"{field}: '{text}' is {len(ids)} tokens of this model; set a text that is one token")
    return int(ids[0])


def join_steps(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], steps: Sequence[str], separator: Sequence[int]
) -> Sample:
    """Prompt and steps, marked where steps end: at the last token of the separator after each.

    Training and scoring both take their tokens from here, and the prompt's from `PromptEncoder`: a model
    that scores other tokens than it was trained on gives scores that mean nothing.
    """
    tokens, ends = list(prompt), []
    for step in steps:
        tokens += tokenizer(step, add_special_tokens=False, verbose=False)["input_ids"]
        tokens += separator
        ends.append(len(tokens) - 1)
    mask_T = np.zeros(len(tokens), np.bool_)
    mask_T[ends] = True
    return Sample(np.array(tokens, np.int32), mask_T)


def split_steps(text: str, separator: str) -> list[str]:
    """The steps of a written solution; blank ones are none."""
    return [step for step in text.split(separator) if step.strip()]
