"""Tokens as text: each token's own piece, never a text that would have to be split again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isotrain import hub
from isotrain.errors import install
from isotrain.files import read_regular
from isotrain.terminal import visible

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LONGEST_PIECE = 200
_LARGEST_FILE = 256 << 20


class Piece(NamedTuple):
    text: str
    special: bool
    raw: bytes | None
    """The bytes of a token that is only a part of a character."""


class Pieces:
    """The texts of tokens; without a tokenizer there are none."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, Piece] = {}
        self._special: set[int] = set()
        if tokenizer is not None:
            added = tokenizer.get_added_tokens_decoder()
            self._special = {number for number, token in added.items() if token.special}

    def of(self, tokens: Sequence[int]) -> tuple[dict[int, list[Any]], dict[int, str]]:
        """`[text, special]` of each token that occurs; and other texts, by their places.

        Those are of tokens that are parts of a character: its text stands where it is complete.
        """
        if self._tokenizer is None:
            return {}, {}
        pieces: dict[int, list[Any]] = {}
        joined: dict[int, str] = {}
        waiting: list[tuple[int, bytes]] = []
        for place, token in enumerate(tokens):
            if token not in self._known:
                self._known[token] = self._look_up(token)
            piece = self._known[token]
            pieces[token] = [piece.text, piece.special]
            if piece.raw is None:
                waiting = []
                continue
            waiting.append((place, piece.raw))
            together = b"".join(raw for _, raw in waiting)
            try:
                text = together.decode()
            except UnicodeDecodeError as error:
                if error.reason != "unexpected end of data":
                    waiting = []
                continue
            # The token that completes a character shows it.
            joined |= {earlier: "" for earlier, _ in waiting[:-1]}
            joined[place] = _shown(text)
            waiting = []
        return pieces, joined

    def text(self, tokens: Sequence[int]) -> str | None:
        """All pieces in one string, for a preview."""
        if self._tokenizer is None:
            return None
        pieces, joined = self.of(tokens)
        return "".join(joined.get(place, pieces[token][0]) for place, token in enumerate(tokens))

    def _look_up(self, token: int) -> Piece:
        assert self._tokenizer is not None
        # A file may hold any numbers, and the library takes only those of 32 bits.
        name = self._tokenizer.id_to_token(token) if 0 <= token < 1 << 32 else None
        if name is None:
            return Piece(f"⟨id {token}⟩", False, None)
        if token in self._special:
            return Piece(_shown(name), True, None)
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            raw = _bytes_of(name)
            if raw is not None:
                return Piece("".join(f"⟨{byte:02X}⟩" for byte in raw[:_LONGEST_PIECE]), False, raw)
        elif name.startswith("▁") and not text.startswith(" "):  # decoding alone strips the first space
            text = f" {text}"
        return Piece(_shown(text), False, None)


def _shown(text: str) -> str:
    """Controls, bidirectional and zero-width marks are spelled out: no text pretends to be another one."""
    cut = text if len(text) <= _LONGEST_PIECE else f"{text[:_LONGEST_PIECE]}…"
    return visible(cut)


def _byte_names() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes as (those of GPT-2)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_names()


def _bytes_of(name: str) -> bytes | None:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):  # byte fallback of SentencePiece
        try:
            return bytes([int(name[3:5], 16)])
        except ValueError:
            return None
    known = [_BYTES[character] for character in name if character in _BYTES]
    return bytes(known) if len(known) == len(name) else None


def find_tokenizer(model: str | None, run: Path) -> Path | None:
    """`tokenizer.json` of the model that a run was started with, on this machine; the network is never asked.

    A relative path is tried from here, and from the directories that the run is in.
    """
    if not model:
        return None
    given = Path(model).expanduser()
    for base in (Path(), run.absolute(), *run.absolute().parents):
        if (file := base / given / "tokenizer.json").is_file():
            return file
    if given.is_absolute() or model.startswith((".", "~")):
        return None
    return hub.cached_file(model, "tokenizer.json")


def load_pieces(file: Path | None) -> tuple[Pieces, str | None]:
    """The pieces of a tokenizer; or none, and why not."""
    if file is None:
        return Pieces(None), "the run's model has no tokenizer.json here; give its directory with --tokenizer"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return Pieces(None), f"the package 'tokenizers' is missing: {install('train')}"
    try:
        return Pieces(Tokenizer.from_str(read_regular(file, _LARGEST_FILE).decode())), None
    except Exception as error:  # the library raises its errors as plain `Exception`
        return Pieces(None), f"{file} cannot be read: {str(error)[:200]}"
