"""Token pieces: each token's own text, characters that are spread over several, texts that pretend."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from view_runs import tokenizer_of

from isotrain.tools.view.tokens import Pieces, find_tokenizer, load_pieces


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return tokenizer_of(tiny)


@pytest.mark.parametrize("text", ["What is 2 + 3?\n", "é 水 👩‍🔬 ok", "  two\tspaces", "مرحبا"])
def test_pieces_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text).ids
    shown = Pieces(tokenizer).text(tokens)
    assert shown == text.replace("\u200d", "\\u200d")


def test_a_character_of_several_tokens_stands_at_the_last(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("水").ids
    assert len(tokens) == 3
    pieces, joined = Pieces(tokenizer).of(tokens)
    assert joined == {0: "", 1: "", 2: "水"}
    assert pieces[tokens[0]] == ["⟨E6⟩", False]
    # Without its end it stays bytes, and the next character is whole again.
    assert Pieces(tokenizer).text([*tokens[:2], *tokenizer.encode("a水").ids]) == "⟨E6⟩⟨B0⟩a水"
    assert Pieces(tokenizer).text([tokens[1], *tokens]) == "⟨B0⟩水"


def test_special_tokens_and_numbers_outside_the_vocabulary(tokenizer: Tokenizer) -> None:
    start = tokenizer.token_to_id("<|im_start|>")
    pieces, _ = Pieces(tokenizer).of([start, 99_999, -5, 2**40])
    assert pieces[start] == ["<|im_start|>", True]
    assert [pieces[token][0] for token in (99_999, -5, 2**40)] == [
        "⟨id 99999⟩",
        "⟨id -5⟩",
        "⟨id 1099511627776⟩",
    ]


def test_what_cannot_be_seen_is_spelled_out(tokenizer: Tokenizer) -> None:
    shown = Pieces(tokenizer).text(tokenizer.encode("a\u202eb\u2066c\x1b[31m\u200bd\x00").ids)
    assert shown == "a\\u202eb\\u2066c\\x1b[31m\\u200bd\\x00"


def test_a_huge_token_is_cut() -> None:
    huge = Tokenizer(models.WordLevel({"x" * 1_000_000: 0, "<unk>": 1}, unk_token="<unk>"))
    huge.add_special_tokens([AddedToken("y" * 10_000, special=True)])
    assert all(len(Pieces(huge).text([token]) or "") < 300 for token in (0, 2))


def test_bytes_and_spaces_of_sentencepiece() -> None:
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2, "<0xE6>": 3, "<0xB0>": 4, "<0xB4>": 5}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    assert Pieces(made).text([1, 2, 1, 3, 4, 5]) == " ab a水"


def test_where_the_tokenizer_is(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tiny / "model" / "tokenizer.json"
    assert find_tokenizer(str(tiny / "model"), tmp_path) == file
    # A relative path was meant from where the run was started; the run is often below it.
    run = tiny / "runs" / "one"
    found = find_tokenizer("model", run)
    assert found is not None and found.samefile(file)
    monkeypatch.chdir(tiny)
    assert find_tokenizer("model", tmp_path) is not None
    assert find_tokenizer("someone/not-in-the-cache@v1", tmp_path) is None
    assert find_tokenizer("not a name at all!", tmp_path) is None
    assert find_tokenizer(None, tmp_path) is None


def test_without_a_tokenizer_there_are_numbers(tmp_path: Path) -> None:
    pieces, why = load_pieces(None)
    assert why is not None and "--tokenizer" in why
    assert pieces.of([1, 2]) == ({}, {}) and pieces.text([1]) is None
    (tmp_path / "tokenizer.json").write_text('{"no": "tokenizer"}')
    _, why = load_pieces(tmp_path / "tokenizer.json")
    assert why is not None and "cannot be read" in why
