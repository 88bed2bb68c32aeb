"""Preference items tokenised once, as memory-mapped files that every rank shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from isotrain.data.mapped import Entry, Mapped, Progress, Ragged, build_mapped
from isotrain.data.preference_items import FORMAT_VERSION, Item, PreferenceEncoder
from isotrain.data.rows import Row, read_rows, source_digest
from isotrain.data.sample import Sample
from isotrain.data.store import store_key

_TOKENS, _MASK, _LENGTHS, _VALUES = "tokens.bin", "mask.bin", "lengths.bin", "values.bin"
_PROMPTS, _PROMPT_IDS = "prompts.bin", "prompt-ids.bin"
_LAYOUT = (
    Ragged("tokens", {_TOKENS: "<i4", _MASK: "|u1"}, "offsets.bin"),
    Ragged("samples", {_LENGTHS: "<i8", _PROMPTS: "<i8", _PROMPT_IDS: "<i8"}, "sample-offsets.bin"),
    Ragged("values", {_VALUES: "<f4"}, "value-offsets.bin"),
)


class PreferenceStore:
    """Items by number. Only the pages that are read take memory."""

    def __init__(self, mapped: Mapped) -> None:
        meta = mapped.meta
        self.directory = mapped.directory
        self.dropped: int = meta["dropped"]
        """Rows that were left out."""
        self.samples: int = meta["samples"]
        self.tokens: int = meta["tokens"]
        self.digest: str = meta["digest"]
        """SHA-256 over the SHA-256 sums of all files: the identity of the training data."""
        self.lengths: npt.NDArray[np.int64] = np.diff(mapped.offsets[_TOKENS])
        """Tokens of each item, over all its samples."""
        self._mapped = mapped

    @classmethod
    def open(cls, directory: Path) -> PreferenceStore:
        """An existing store; files that do not fit their description are an error."""
        return cls(Mapped.open(directory, _LAYOUT))

    def __len__(self) -> int:
        return len(self.lengths)

    def sizes(self, number: int) -> list[tuple[int, int]]:
        """Tokens of each sample of an item, and how many of them are its prompt; no token is read."""
        lengths, prompts = self._mapped.get(_LENGTHS, number), self._mapped.get(_PROMPTS, number)
        return list(zip(lengths.tolist(), prompts.tolist(), strict=True))

    def prompt_ids(self) -> npt.NDArray[np.int64]:
        """Of each item's first sample."""
        return np.array(self._mapped.arrays[_PROMPT_IDS][self._mapped.offsets[_PROMPT_IDS][:-1]], np.int64)

    def labels(self, number: int) -> int:
        """How many an item has; none is read."""
        offsets = self._mapped.offsets[_VALUES]
        return int(offsets[number + 1] - offsets[number])

    def __getitem__(self, number: int) -> Item:
        # Copies: items outlive the map, and torch wants memory that it may write to.
        tokens_T = np.array(self._mapped.get(_TOKENS, number), np.int32)
        mask_T = np.array(self._mapped.get(_MASK, number), np.bool_)
        bounds = np.cumsum(self._mapped.get(_LENGTHS, number))[:-1]
        samples = zip(np.split(tokens_T, bounds), np.split(mask_T, bounds), strict=True)
        values_V = np.array(self._mapped.get(_VALUES, number), np.float32)
        return Item(tuple(Sample(tokens, mask) for tokens, mask in samples), values_V)


def cached_preferences(
    source: str | Sequence[str], encoder: PreferenceEncoder, root: Path, progress: Progress | None = None
) -> PreferenceStore:
    """The items of a source under `root`, built if they are not there."""
    key = store_key(source_digest(source), encoder.tokenizer, encoder.settings)
    directory = root / key
    if directory.is_dir():
        return PreferenceStore.open(directory)
    return build_preferences(read_rows(source), encoder, directory, key, progress)


def build_preferences(
    rows: Iterable[Row],
    encode: Callable[[Row], list[Item]],
    directory: Path,
    key: str,
    progress: Progress | None = None,
) -> PreferenceStore:
    """Encode all rows into a directory that appears whole or not at all."""

    def items() -> Iterator[Item | None]:
        for row in rows:
            found = encode(row)
            yield from found
            if not found:
                yield None  # counted as left out

    build_mapped(items(), _entry, directory, _LAYOUT, {"version": FORMAT_VERSION, "key": key}, progress)
    return PreferenceStore.open(directory)


def _entry(item: Item | None) -> Entry | None:
    if item is None:
        return None
    return Entry(
        {
            _TOKENS: np.concatenate([sample.tokens_T for sample in item.samples]),
            _MASK: np.concatenate([sample.mask_T for sample in item.samples]),
            _LENGTHS: np.array([len(sample) for sample in item.samples]),
            _PROMPTS: np.array(item.prompts),
            _PROMPT_IDS: np.array(item.prompt_ids),
            _VALUES: item.values_V,
        }
    )
