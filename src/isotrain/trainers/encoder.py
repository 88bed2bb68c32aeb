"""The encoder of a recipe's preference rows, without torch: `isotrain preview` shows what it makes."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from isotrain.data.preference import PreferenceEncoder
from isotrain.recipe.data import DataSection
from isotrain.recipe.preference import PreferenceSection, PrmSection, RmSection


def preference_encoder(
    tokenizer: PreTrainedTokenizerBase, data: DataSection, algorithm: PreferenceSection
) -> PreferenceEncoder:
    separator = algorithm.step_separator if isinstance(algorithm, PrmSection) else ""
    margins = isinstance(algorithm, RmSection) and algorithm.margins
    return PreferenceEncoder(
        tokenizer,
        algorithm.kind,
        data.max_length,
        data.too_long,
        separator,
        margins=margins,
        scored=isinstance(algorithm, RmSection),
    )
