"""Samples that begin alike, packed with that beginning stored once.

T: stored tokens, N: loss-bearing tokens, S: samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from isotrain.data.packing import PackedBatch, pack
from isotrain.data.sample import Sample

Places = npt.NDArray[np.int64]


@dataclass
class _Layout:
    """Segments one after the other, each with the one that it continues."""

    tokens: list[npt.NDArray[np.int32]] = field(default_factory=list)
    positions: list[Places] = field(default_factory=list)
    continues: list[int] = field(default_factory=list)
    stored: int = 0

    def add(self, tokens_T: npt.NDArray[np.int32], position: int = 0, continues: int = -1) -> Places:
        """Store a segment whose first token is at `position` of its sample; returns where its tokens are."""
        self.tokens.append(tokens_T)
        self.positions.append(np.arange(position, position + len(tokens_T)))
        self.continues.append(continues)
        self.stored += len(tokens_T)
        return np.arange(self.stored - len(tokens_T), self.stored)


def same_prompt(samples: Sequence[Sample], prompts: Sequence[int]) -> list[list[int]]:
    """Numbers of the samples whose first `prompts[i]` tokens are equal, group by group."""
    groups: dict[bytes, list[int]] = {}
    for number, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
        groups.setdefault(sample.tokens_T[:prompt].tobytes(), []).append(number)
    return list(groups.values())


def pack_shared(samples: Sequence[Sample], prompts: Sequence[int]) -> PackedBatch:
    """As `pack` does, but equal prompts (the first `prompts[i]` tokens of sample i) are computed once.

    Loss-bearing tokens stay in the order of the samples. A prompt that only one sample has is not split off.
    """
    if not samples:
        return pack(samples)
    layout = _Layout()
    places: list[Places] = [np.zeros(0, np.int64)] * len(samples)
    for members in same_prompt(samples, prompts):
        if len(members) == 1 or not prompts[members[0]]:
            for number in members:
                places[number] = layout.add(samples[number].tokens_T)
            continue
        prompt = prompts[members[0]]
        trunk, trunk_places = len(layout.tokens), layout.add(samples[members[0]].tokens_T[:prompt])
        # Neighbours of equal length share one attention call.
        for number in sorted(members, key=lambda member: len(samples[member])):
            rest_T = samples[number].tokens_T[prompt:]
            own = layout.add(rest_T, prompt, trunk) if len(rest_T) else np.zeros(0, np.int64)
            places[number] = np.concatenate([trunk_places, own])
    # Within each sample: what it predicts from the second token on, and from where.
    targets = [np.flatnonzero(sample.mask_T[1:]) + 1 for sample in samples]
    tokens_T = np.concatenate(layout.tokens).astype(np.int64)
    predict_N = np.concatenate([place[at - 1] for place, at in zip(places, targets, strict=True)])
    target_at_N = np.concatenate([place[at] for place, at in zip(places, targets, strict=True)])
    return PackedBatch(
        tokens_T=torch.from_numpy(tokens_T),
        positions_T=torch.from_numpy(np.concatenate(layout.positions)),
        lengths=tuple(len(tokens) for tokens in layout.tokens),
        predict_N=torch.from_numpy(predict_N),
        predict_on_host_N=predict_N,
        targets_N=torch.from_numpy(tokens_T[target_at_N]),
        last_S=torch.tensor([int(place[-1]) for place in places]),
        continues=tuple(layout.continues) if max(layout.continues) >= 0 else (),
    )
