"""`isotrain preview`: the first samples or prompts, token by token, as training will see them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Option

from isotrain.api import load_recipe
from isotrain.cli.arguments import Overrides, RecipeName
from isotrain.errors import DataError
from isotrain.terminal import rich_console

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from isotrain.data.items import Sample
    from isotrain.data.pictures import Picture
    from isotrain.data.rows import Row
    from isotrain.recipe.online import RewardSection
    from isotrain.recipe.preference import PreferenceSection
    from isotrain.recipe.schema import Recipe

_LOSS, _NO_LOSS = "bold green", "dim"
_WARNING = "bold yellow"
_OPEN, _CLOSE, _BETWEEN = "⟦", "⟧", "│"
# Titles of the samples of an item.
SIDES = {"pairs": ("chosen", "rejected"), "responses": ("response",), "steps": ("solution",)}
_SIGNS = f"{_BETWEEN} token boundary  · space  ⏎ newline  ⇥ tab"


def preview(
    recipe: RecipeName,
    overrides: Overrides = None,
    rows: Annotated[int, Option(min=1, help="How many samples to show.")] = 3,
) -> None:
    """Show the first training samples token by token, and which tokens have loss."""
    checked = load_recipe(recipe, *(overrides or []))
    _hide_torch()
    from isotrain.models.files import load_tokenizer, model_directory
    from isotrain.recipe.online import OnlineSection
    from isotrain.recipe.preference import PreferenceSection

    tokenizer = load_tokenizer(model_directory(checked.model.path))
    if isinstance(checked.algorithm, OnlineSection):
        _preview_prompts(checked, tokenizer, rows)
    elif isinstance(checked.algorithm, PreferenceSection):
        _preview_preferences(checked, checked.algorithm, tokenizer, rows)
    else:
        _preview_samples(checked, tokenizer, rows)


def _hide_torch() -> None:
    """A tokenizer needs no torch, which takes longer to import than all else together.

    A process that has it already, or transformers, goes on with it.
    """
    if not {"torch", "transformers"} & sys.modules.keys():
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        sys.modules["torch"] = None  # type: ignore[assignment]


def _preview_samples(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    from isotrain.trainers.encoder import sample_encoder

    console = rich_console()
    encoder = sample_encoder(tokenizer, recipe)
    shown: list[Sample] = []

    def show(row: Row) -> bool:
        sample = encoder(row)
        if sample is not None:
            shown.append(sample)
            _print_sample(console, f"{row.origin}: {_counts([sample])}", sample, tokenizer)
            console.print()
        return sample is not None

    left_out = _show_rows(recipe, rows, show, "no sample")
    console.print(_legend(console), soft_wrap=True)
    plural = "s" if len(shown) > 1 else ""
    console.print(Text(f"{len(shown)} sample{plural}: {_counts(shown)}"), soft_wrap=True)
    _print_left_out(console, left_out)


def _preview_preferences(
    recipe: Recipe, algorithm: PreferenceSection, tokenizer: PreTrainedTokenizerBase, rows: int
) -> None:
    """Both sides of each pair, responses with their label, or steps with theirs."""
    from isotrain.trainers.encoder import preference_encoder

    encoder, console = preference_encoder(tokenizer, recipe.data, algorithm), rich_console()

    def show(row: Row) -> bool:
        items = encoder(row)
        for item in items:
            labels = ", ".join(f"{value:g}" for value in item.values_V)
            for side, sample in zip(SIDES[algorithm.kind], item.samples, strict=True):
                title = f"{row.origin} {side}: {_counts([sample])}" + (f"; {labels}" if labels else "")
                _print_sample(console, title, sample, tokenizer)
            console.print()
        return bool(items)

    left_out = _show_rows(recipe, rows, show, "nothing")
    console.print(_legend(console), soft_wrap=True)
    _print_left_out(console, left_out)


def _preview_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Each prompt up to the start of the response, and the reference answer of its row."""
    from isotrain.trainers.encoder import prompt_encoder

    reward, console = recipe.reward, rich_console()
    assert reward is not None, "recipes of online algorithms have one"
    encoder = prompt_encoder(tokenizer, recipe)
    lengths: list[int] = []

    def show(row: Row) -> bool:
        prompts = encoder.values(row)
        if not prompts:
            return False
        tokens, pictures = prompts[0].tokens_P.tolist(), prompts[0].pictures
        lengths.append(len(tokens))
        console.print(Text(f"{row.origin}: {len(tokens):,} tokens", style="bold"), soft_wrap=True)
        _print_pictures(console, pictures)
        pieces = [piece for piece in _pieces(tokenizer, tokens, pictures) if piece]
        console.print(Text(_joined(pieces).rstrip("\n")), soft_wrap=True)
        console.print(_answer(row, reward), soft_wrap=True)
        console.print()
        return True

    left_out = _show_rows(recipe, rows, show, "no prompt")
    console.print(Text(_SIGNS), soft_wrap=True)
    plural = "s" if len(lengths) > 1 else ""
    console.print(Text(f"{len(lengths)} prompt{plural}: {sum(lengths):,} tokens"), soft_wrap=True)
    _print_left_out(console, left_out)


def _show_rows(recipe: Recipe, rows: int, show: Callable[[Row], bool], nothing: str) -> int:
    """Show the first rows; returns how many before them were left out."""
    from isotrain.data.rows import read_rows

    shown = left_out = 0
    for row in read_rows(recipe.data.train):
        if show(row):
            shown += 1
        else:
            left_out += 1
        if shown == rows:
            break
    if not shown:
        raise DataError(f"data.train has {nothing} to show: {left_out} rows were read and left out")
    return left_out


def _print_sample(console: Console, title: str, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> None:
    console.print(Text(title, style="bold"), soft_wrap=True)
    _print_pictures(console, sample.pictures)
    console.print(_as_text(sample, tokenizer, _coloured(console)), soft_wrap=True)


def _print_pictures(console: Console, pictures: Sequence[Picture]) -> None:
    for number, picture in enumerate(pictures, 1):
        _, rows, columns = picture.grid
        side = math.isqrt(picture.patches_PD.shape[1] // 3)
        text = (
            f"picture {number}: {columns * side} x {rows * side} pixels, {columns} x {rows} patches, "
            f"tokens {picture.start:,} to {picture.stop - 1:,}"
        )
        console.print(Text(text, style=_NO_LOSS), soft_wrap=True)


def _pieces(tokenizer: PreTrainedTokenizerBase, tokens: list[int], pictures: Sequence[Picture]) -> list[str]:
    """What is shown of each token; of a picture's tokens only the first, with their number."""
    pieces = [_visible(piece) for piece in token_texts(tokenizer, tokens)]
    for picture in pictures:
        first = f"{pieces[picture.start]}x{picture.tokens:,}"
        pieces[picture.start : picture.stop] = [first] + [""] * (picture.tokens - 1)
    return pieces


def _coloured(console: Console) -> bool:
    """Without colour (a pipe, NO_COLOR) brackets say the same."""
    return console.is_terminal and not console.no_color


def _answer(row: Row, reward: RewardSection) -> Text:
    from isotrain.data.formats import value_at

    answer = value_at(row.values, reward.answer_key)
    if answer is not None:
        spelled = answer if isinstance(answer, str) else repr(answer)
        return Text(f"answer ({reward.answer_key}): {_visible(spelled, newline='⏎')}")
    if not (reward.gsm8k or reward.math or reward.code or reward.function):
        return Text(f"no '{reward.answer_key}'; a reward model needs none")
    columns = ", ".join(f"'{name}'" for name in row.values)
    problem = f"no '{reward.answer_key}' for the reward to compare with; the row has {columns}"
    return Text(f"warning: {problem}: set reward.answer_key", style=_WARNING)


def _print_left_out(console: Console, left_out: int) -> None:
    if left_out:
        console.print(Text(f"{left_out} rows were dropped (data.too_long: drop)"), soft_wrap=True)


def _counts(samples: list[Sample]) -> str:
    tokens = sum(len(sample) for sample in samples)
    loss = sum(int(sample.mask_T.sum()) for sample in samples)
    return f"{tokens:,} tokens, {loss:,} with loss ({loss / tokens:.0%})"


def _legend(console: Console) -> Text:
    if _coloured(console):
        return Text.assemble(("loss", _LOSS), "  ", ("no loss", _NO_LOSS), f"  {_SIGNS}")
    return Text(f"{_OPEN}loss{_CLOSE}  no loss  {_SIGNS}")


def _as_text(sample: Sample, tokenizer: PreTrainedTokenizerBase, coloured: bool) -> Text:
    pieces = _pieces(tokenizer, sample.tokens_T.tolist(), sample.pictures)
    text = Text()
    for loss, run in groupby(zip(sample.mask_T.tolist(), pieces, strict=True), key=lambda pair: pair[0]):
        joined = _joined([piece for _, piece in run if piece])
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
    """The text of each token on its own."""
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
    signs = {" ": "·", "\n": newline, "\t": "⇥"}
    return "".join(signs.get(c) or (c if c.isprintable() else f"\\u{ord(c):04x}") for c in text)
