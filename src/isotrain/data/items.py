"""Samples, and items: samples that are learned from together, with their labels.

T: tokens of one sample, V: labels of an item.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isotrain.data.pictures import Picture, PictureFiles, rows_of, stored_rows
from isotrain.data.store import Codec, Columns, Ragged, SampleStore


@dataclass(frozen=True)
class Sample:
    """Token ids and, for each of them, whether the loss is taken on it."""

    tokens_T: npt.NDArray[np.int32]
    mask_T: npt.NDArray[np.bool_]
    pictures: tuple[Picture, ...] = ()
    """Pictures in the order of their places among the tokens."""

    def __post_init__(self) -> None:
        assert self.tokens_T.shape == self.mask_T.shape and self.tokens_T.ndim == 1

    def __len__(self) -> int:
        return len(self.tokens_T)


TOKENS, MASK, LENGTHS, PROMPTS, PROMPT_IDS, VALUES = (
    f"{name}.bin" for name in ("tokens", "mask", "lengths", "prompts", "prompt-ids", "values")
)


@dataclass(frozen=True)
class Item:
    """A sample alone, the two samples of a pair, a labelled response, or a solution in steps.

    Pairs: chosen, then rejected; the label is the margin, or nothing. Responses: 1 for desirable, 0 for
    not. Solutions: the mask is true at the last token of each step, and there are as many labels.
    """

    samples: tuple[Sample, ...]
    values_V: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))

    def __len__(self) -> int:
        return sum(len(sample) for sample in self.samples)

    @property
    def prompts(self) -> tuple[int, ...]:
        """Tokens of each sample before the first that is marked."""
        return tuple(int(np.argmax(sample.mask_T)) for sample in self.samples)


class Size(NamedTuple):
    """Tokens of a sample, how many of them are the prompt, and a hash of these."""

    tokens: int
    prompt: int = 0
    prompt_id: int = 0


def sizes(store: SampleStore[Item], number: int) -> list[Size]:
    """Size of each sample of an item; no token is read."""
    if LENGTHS not in store.columns:
        return [Size(int(store.lengths[number]))]
    columns = (store.entry(name, number).tolist() for name in (LENGTHS, PROMPTS, PROMPT_IDS))
    return [Size(*size) for size in zip(*columns, strict=True)]


def labels(store: SampleStore[Item], number: int) -> int:
    """Number of labels of an item; no token is read."""
    return int(np.diff(store.offsets[VALUES][number : number + 2])[0]) if VALUES in store.offsets else 0


def _prompt_id(prompt_P: npt.NDArray[np.int32]) -> int:
    return int.from_bytes(hashlib.sha256(prompt_P.tobytes()).digest()[:8], "little", signed=True)


def _write_sample(item: Item) -> Columns:
    return {
        TOKENS: np.concatenate([sample.tokens_T for sample in item.samples]),
        MASK: np.concatenate([sample.mask_T for sample in item.samples]),
    }


def _write_item(item: Item) -> Columns:
    ends = list(zip(item.samples, item.prompts, strict=True))
    return {
        **_write_sample(item),
        LENGTHS: np.array([len(sample) for sample in item.samples]),
        PROMPTS: np.array(item.prompts),
        PROMPT_IDS: np.array([_prompt_id(sample.tokens_T[:end]) for sample, end in ends]),
        VALUES: item.values_V,
    }


def _read(columns: Columns) -> Item:
    bounds: npt.NDArray[np.int64] = np.cumsum(columns.get(LENGTHS, np.zeros(1, np.int64)))[:-1]
    mask_T = columns[MASK].astype(np.bool_)
    samples = zip(np.split(columns[TOKENS], bounds), np.split(mask_T, bounds), strict=True)
    return Item(tuple(Sample(*sample) for sample in samples), columns.get(VALUES, np.zeros(0, np.float32)))


# Raise a codec's version when the same rows and settings give other items than before, or another layout.
_TOKEN_FILES = Ragged("tokens", {TOKENS: "<i4", MASK: "|u1"}, "offsets.bin")
SAMPLES = Codec(1, (_TOKEN_FILES,), _write_sample, _read, {"loss_tokens": MASK})
"""For items that are one sample without labels."""
PICTURES = "pictures.bin"
PICTURE_ROWS = Ragged("picture_numbers", {PICTURES: "<i8"}, "picture-offsets.bin")


def samples_with_pictures(files: PictureFiles) -> Codec[Item]:
    """For items that are one sample; its pictures are read from `files` with it."""

    def read(columns: Columns) -> Item:
        (sample,) = _read(columns).samples
        pictures = tuple(files.load(row) for row in rows_of(columns[PICTURES]))
        return Item((replace(sample, pictures=pictures),))

    def write(item: Item) -> Columns:
        return {**_write_sample(item), PICTURES: stored_rows(item.samples[0].pictures)}

    return Codec(1, (_TOKEN_FILES, PICTURE_ROWS), write, read, {"loss_tokens": MASK})


def picture_patches(store: SampleStore[Item], number: int) -> int:
    """Patches of an item's pictures; no pixel is read."""
    if PICTURES not in store.columns:
        return 0
    return int(rows_of(store.entry(PICTURES, number))[:, 1:4].prod(1).sum())


ITEMS = Codec(
    4,
    (
        _TOKEN_FILES,
        Ragged("samples", {LENGTHS: "<i8", PROMPTS: "<i8", PROMPT_IDS: "<i8"}, "sample-offsets.bin"),
        Ragged("values", {VALUES: "<f4"}, "value-offsets.bin"),
    ),
    _write_item,
    _read,
    {"loss_tokens": MASK},
)
