"""Pictures of a packed micro-batch, each once.

P: patches of all pictures, G: pictures, T: tokens of the micro-batch, M: those that stand for a feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from isotrain.data.items import Sample
from isotrain.data.pictures import Picture, positions_of


class PackedPictures(NamedTuple):
    """Patches of the pictures, and where their features stand among the tokens."""

    patches_PD: torch.Tensor
    """Bytes, of one frame."""
    grids_G3: torch.Tensor
    positions_3T: torch.Tensor
    """Time, row and column of all tokens."""
    places_M: torch.Tensor
    """From recorded ranges, never by token id: a policy can write the image token."""
    features_M: torch.Tensor
    """Which feature stands there: a picture can be in several samples."""

    def to(self, device: torch.device) -> PackedPictures:
        return PackedPictures(*(tensor.to(device, non_blocking=True) for tensor in self))


def joined_pictures(
    samples: Sequence[Sample], sources: Sequence[tuple[int, int, int]]
) -> PackedPictures | None:
    """In the order of the segments; the first segment that has a picture brings its patches."""
    if not any(sample.pictures for sample in samples):
        return None
    positions = [positions_of(len(sample), sample.pictures) for sample in samples]
    firsts: dict[str, int] = {}
    pictures: list[Picture] = []
    places, features, stored, known = [], [], 0, 0
    for number, start, stop in sources:
        for picture in samples[number].pictures:
            if not start <= picture.start < stop:
                continue
            assert picture.stop <= stop, "a segment has the whole of a picture"
            if picture.digest not in firsts:
                firsts[picture.digest] = known
                known += picture.tokens
                pictures.append(picture)
            places.append(np.arange(picture.tokens) + stored + picture.start - start)
            features.append(np.arange(picture.tokens) + firsts[picture.digest])
        stored += stop - start
    arrays = (
        np.concatenate([picture.patches_PD for picture in pictures]),
        np.array([picture.grid for picture in pictures]),
        np.concatenate([positions[number][:, start:stop] for number, start, stop in sources], 1),
        np.concatenate(places),
        np.concatenate(features),
    )
    return PackedPictures(*map(torch.from_numpy, arrays))
