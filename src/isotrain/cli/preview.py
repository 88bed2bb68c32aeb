"""`isotrain preview`: the first samples or prompts, token by token, as training will see them."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from isotrain.api import load_recipe
from isotrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from isotrain.data.encode import Encoder
    from isotrain.data.rows import Row
    from isotrain.data.sample import Sample
    from isotrain.recipe.online import RewardSection
    from isotrain.recipe.preference import PreferenceSection
    from isotrain.recipe.schema import Recipe

_LOSS, _NO_LOSS = "bold green", "dim"
_WARNING = "bold yellow"
_OPEN, _CLOSE, _BETWEEN = "⟦", "⟧", "│"
# What the samples of an item are.
SIDES = {"pairs": ("chosen", "rejected"), "responses": ("response",), "steps": ("solution",)}
_SIGNS = f"{_BETWEEN} token boundary  · space  ⏎ newline  ⇥ tab"


def preview(name: str, overrides: list[str], rows: int) -> None:
    """Print the first `rows` training samples of a recipe, or the first prompts of an online one."""
    from isotrain.recipe.online import OnlineSection
    from isotrain.recipe.preference import PreferenceSection

    recipe = load_recipe(name, *overrides)
    if isinstance(recipe.algorithm, OnlineSection):
        _preview_prompts(recipe, rows)
    elif isinstance(recipe.algorithm, PreferenceSection):
        _preview_preferences(recipe, recipe.algorithm, rows)
    else:
        _preview_samples(recipe, rows)


def _preview_samples(recipe: Recipe, rows: int) -> None:
    from isotrain.data.rows import read_rows

    encoder = _encoder(recipe)
    console = Console()
    # Without colour (a pipe, NO_COLOR) brackets say the same.
    coloured = console.is_terminal and not console.no_color
    shown: list[Sample] = []
    left_out = 0
    for row in read_rows(recipe.data.train):
        sample = encoder(row)
        if sample is None:
            left_out += 1
            continue
        shown.append(sample)
        console.print(Text(f"{row.origin}: {_counts([sample])}", style="bold"), soft_wrap=True)
        console.print(_as_text(sample, encoder.tokenizer, coloured), soft_wrap=True)
        console.print()
        if len(shown) == rows:
            break
    if not shown:
        raise DataError(f"data.train has no sample to show: {left_out} rows were read and left out")
    console.print(_legend(coloured), soft_wrap=True)
    plural = "s" if len(shown) > 1 else ""
    console.print(Text(f"{len(shown)} sample{plural}: {_counts(shown)}"), soft_wrap=True)
    _print_left_out(console, left_out)


def _preview_preferences(recipe: Recipe, algorithm: PreferenceSection, rows: int) -> None:
    """Both sides of each pair, answers with their label, or steps with theirs; loss-bearing tokens are
    marked."""
    from isotrain.data.rows import read_rows
    from isotrain.models.load import load_tokenizer, model_directory
    from isotrain.trainers.setup import preference_encoder

    encoder = preference_encoder(load_tokenizer(model_directory(recipe.model.path)), recipe.data, algorithm)
    console = Console()
    coloured = console.is_terminal and not console.no_color
    shown = left_out = 0
    for row in read_rows(recipe.data.train):
        items = encoder(row)
        left_out += not items
        for item in items:
            labels = ", ".join(f"{value:g}" for value in item.values_V)
            for side, sample in zip(SIDES[algorithm.kind], item.samples, strict=True):
                told = f"{row.origin} {side}: {_counts([sample])}" + (f"; {labels}" if labels else "")
                console.print(Text(told, style="bold"), soft_wrap=True)
                console.print(_as_text(sample, encoder.tokenizer, coloured), soft_wrap=True)
            console.print()
        shown += bool(items)
        if shown == rows:
            break
    if not shown:
        raise DataError(f"data.train has nothing to show: {left_out} rows were read and left out")
    console.print(_legend(coloured), soft_wrap=True)
    _print_left_out(console, left_out)


def _preview_prompts(recipe: Recipe, rows: int) -> None:
    """Each prompt up to where the policy's response begins, and what its row tells the reward."""
    from isotrain.data.prompts import PromptEncoder
    from isotrain.data.rows import read_rows
    from isotrain.models.load import load_tokenizer, model_directory

    data, reward = recipe.data, recipe.reward
    assert reward is not None, "recipes of online algorithms have one"
    tokenizer = load_tokenizer(model_directory(recipe.model.path))
    encoder = PromptEncoder(tokenizer, data.prompt_key, data.max_length, data.too_long)
    console = Console()
    lengths: list[int] = []
    left_out = 0
    for row in read_rows(data.train):
        prompt_P = encoder(row)
        if prompt_P is None:
            left_out += 1
            continue
        lengths.append(len(prompt_P))
        console.print(Text(f"{row.origin}: {len(prompt_P):,} tokens", style="bold"), soft_wrap=True)
        pieces = [_visible(piece) for piece in token_texts(tokenizer, prompt_P.tolist())]
        console.print(Text(_joined(pieces).rstrip("\n")), soft_wrap=True)
        console.print(_answer(row, reward), soft_wrap=True)
        console.print()
        if len(lengths) == rows:
            break
    if not lengths:
        raise DataError(f"data.train has no prompt to show: {left_out} rows were read and left out")
    console.print(Text(_SIGNS), soft_wrap=True)
    plural = "s" if len(lengths) > 1 else ""
    console.print(Text(f"{len(lengths)} prompt{plural}: {sum(lengths):,} tokens"), soft_wrap=True)
    _print_left_out(console, left_out)


def _answer(row: Row, reward: RewardSection) -> Text:
    from isotrain.data.formats import value_at

    answer = value_at(row.values, reward.answer_key)
    if answer is not None:
        spelled = answer if isinstance(answer, str) else repr(answer)
        return Text(f"answer ({reward.answer_key}): {_visible(spelled, newline='⏎')}")
    if not (reward.gsm8k or reward.math or reward.function):
        return Text(f"no '{reward.answer_key}'; a reward model needs none")
    found = ", ".join(f"'{name}'" for name in row.values)
    return Text(
        f"warning: no '{reward.answer_key}' for the reward to compare with; the row has {found}: "
        "set reward.answer_key",
        style=_WARNING,
    )


def _print_left_out(console: Console, left_out: int) -> None:
    if left_out:
        console.print(Text(f"{left_out} rows on the way were left out (data.too_long: drop)"), soft_wrap=True)


def _encoder(recipe: Recipe) -> Encoder:
    from isotrain.data.encode import Encoder
    from isotrain.models.load import load_tokenizer, model_directory

    data = recipe.data
    tokenizer = load_tokenizer(model_directory(recipe.model.path))
    return Encoder(
        tokenizer, data.format, data.prompt_key, data.completion_key, data.max_length, data.too_long
    )


def _counts(samples: list[Sample]) -> str:
    tokens = sum(len(sample) for sample in samples)
    loss = sum(int(sample.mask_T.sum()) for sample in samples)
    return f"{tokens:,} tokens, {loss:,} with loss ({loss / tokens:.0%})"


def _legend(coloured: bool) -> Text:
    text = Text()
    if coloured:
        text.append("loss", _LOSS)
        text.append("  ")
        text.append("no loss", _NO_LOSS)
    else:
        text.append(f"{_OPEN}loss{_CLOSE}  no loss")
    return text.append(f"  {_SIGNS}")


def _as_text(sample: Sample, tokenizer: PreTrainedTokenizerBase, coloured: bool) -> Text:
    pieces = [_visible(piece) for piece in token_texts(tokenizer, sample.tokens_T.tolist())]
    text = Text()
    for loss, run in groupby(zip(sample.mask_T.tolist(), pieces, strict=True), key=lambda pair: pair[0]):
        joined = _joined([piece for _, piece in run])
        if loss and not coloured:
            joined = f"{_OPEN}{joined}{_CLOSE}"
        elif text and not text.plain.endswith(("\n", _CLOSE)):
            text.append(_BETWEEN, _NO_LOSS)
        text.append(joined, _LOSS if loss else _NO_LOSS)
    text.rstrip()
    return text


def _joined(pieces: list[str]) -> str:
    return _BETWEEN.join(pieces).replace(f"\n{_BETWEEN}", "\n")


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """What each token stands for on its own."""
    texts = []
    for token in tokens:
        name = str(tokenizer.convert_ids_to_tokens(token))
        text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if "\ufffd" in text:  # a part of a character: the vocabulary's own name for its bytes
            text = name
        elif name.startswith("▁") and not text.startswith(" "):  # decoding alone strips the first space
            text = f" {text}"
        texts.append(text)
    return texts


def _visible(text: str, newline: str = "⏎\n") -> str:
    """White space made visible; control characters spelled out, so that data cannot steer the terminal."""
    seen = []
    for character in text:
        if character in " \n\t":
            seen.append({" ": "·", "\n": newline, "\t": "⇥"}[character])
        else:
            seen.append(character if character.isprintable() else f"\\u{ord(character):04x}")
    return "".join(seen)
