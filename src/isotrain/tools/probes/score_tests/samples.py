"""Bounded parts of a module's inputs and outputs, as float64 on the host.

T: tokens of a row, S: samples, D: size of a vector, H: query heads, G: key/value heads, R: queries of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from isotrain.tools.probes.score_tests.fit import Array
from isotrain.tools.probes.score_tests.modules import AttentionSample, turned_exactly

# A norm's numbers, and an attention's scores, that are looked at: a tenth of a second each on one core.
NUMBERS, SCORES = 1 << 19, 1 << 22
SAMPLES, QUERIES, KEY_HEADS, QUERY_HEADS = 64, 64, 8, 4


@dataclass(frozen=True)
class Segment:
    """Tokens of one sample in one row, after those of the segment that it continues, if any."""

    row: int
    start: int
    end: int
    trunk: tuple[int, int] = (0, 0)


def segments(lengths: Sequence[int], continues: Sequence[int], padded: bool) -> list[Segment]:
    if padded:
        return [Segment(row, 0, length) for row, length in enumerate(lengths)]
    ends = list(accumulate(lengths))
    spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    trunks = [spans[trunk] if trunk >= 0 else (0, 0) for trunk in continues or (-1,) * len(spans)]
    return [Segment(0, start, end, trunk) for (start, end), trunk in zip(spans, trunks, strict=True)]


def spread(count: int, most: int) -> npt.NDArray[np.int64]:
    """Up to so many of `count` places, evenly."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def on_host(tensor: torch.Tensor) -> Array:
    """Moved before it is widened: not every device has float64."""
    return tensor.detach().cpu().to(torch.float64, copy=True).numpy()


def rows(x: torch.Tensor, y: torch.Tensor) -> tuple[Array, Array]:
    """The same rows of an input and of an output."""
    size = x.shape[-1]
    x_RD, y_RD = x.detach().reshape(-1, size), y.detach().reshape(-1, size)
    some = torch.from_numpy(spread(len(x_RD), max(32, NUMBERS // size))).to(x.device)
    return on_host(x_RD[some]), on_host(y_RD[some])


@dataclass(frozen=True)
class Heads:
    """Inputs and output of one attention; tokens are before heads."""

    query_STHD: torch.Tensor
    key_STGD: torch.Tensor
    value_STGD: torch.Tensor
    cos_STD: torch.Tensor
    sin_STD: torch.Tensor
    output_STHD: torch.Tensor
    window: int | None

    def samples(self, all_segments: Sequence[Segment]) -> list[AttentionSample]:
        # A first token sees itself alone: nothing that a scale could change.
        long = [segment for segment in all_segments if segment.end - segment.start > 1]
        chosen = [long[number] for number in spread(len(long), SAMPLES)] if long else []
        return [self._sample(segment, SCORES // len(chosen)) for segment in chosen]

    def _sample(self, segment: Segment, scores: int) -> AttentionSample:
        heads, groups = self.query_STHD.shape[2], self.key_STGD.shape[2]
        repeats = heads // groups
        group_G, repeat_R = spread(groups, KEY_HEADS), spread(repeats, QUERY_HEADS)
        past = segment.trunk[1] - segment.trunk[0]
        keys = past + segment.end - segment.start
        most = max(1, scores // (keys * len(group_G) * len(repeat_R)))
        query_Q = spread(segment.end - segment.start, min(QUERIES, most))
        token_K = np.concatenate([np.arange(*segment.trunk), np.arange(segment.start, segment.end)])
        head_GR = group_G[:, None] * repeats + repeat_R
        own_Q = segment.start + query_Q
        query_GRQD = self._part(self.query_STHD, segment.row, own_Q, head_GR)
        key_GKD = self._part(self.key_STGD, segment.row, token_K, group_G)
        value_GKD = self._part(self.value_STGD, segment.row, token_K, group_G)
        observed_GRQD = self._part(self.output_STHD, segment.row, own_Q, head_GR)
        turns = (self._turn(segment.row, own_Q), self._turn(segment.row, token_K))
        ahead_QK = past + query_Q[:, None] - np.arange(keys)
        seen_QK = (ahead_QK >= 0) & (ahead_QK < (self.window or math.inf))
        turned = partial(turned_exactly, "")
        return AttentionSample(query_GRQD, key_GKD, value_GKD, *turns, seen_QK, observed_GRQD, turned)

    def _part(
        self, x: torch.Tensor, row: int, tokens: npt.NDArray[np.int64], heads: npt.NDArray[np.int64]
    ) -> Array:
        part_THD = on_host(x[row].index_select(0, torch.from_numpy(tokens).to(x.device)))
        return part_THD.swapaxes(0, 1)[heads]

    def _turn(self, row: int, tokens: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        # All samples may share one row of angles.
        row = min(row, len(self.cos_STD) - 1)
        token_T = torch.from_numpy(tokens).to(self.cos_STD.device)
        cos, sin = (on_host(x[row].index_select(0, token_T)) for x in (self.cos_STD, self.sin_STD))
        return cos, sin
