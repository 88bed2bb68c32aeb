"""The order in which samples are visited: a function of three integers, at any position, without a list.

B: samples of one batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_ROUNDS = 6


@dataclass
class Sampler:
    """Batches of row indices over endless epochs; its whole state is how many samples were taken.

    Epochs flow into each other, so that no row is left out when the row count is not a multiple of the
    batch size. `limit` (rows x epochs, or None) makes the last batch short instead of crossing into one
    epoch too many.
    """

    rows: int
    batch_size: int
    seed: int
    shuffle: bool = True
    limit: int | None = None
    taken: int = 0

    def next_batch(self) -> npt.NDArray[np.int64]:
        end = self.taken + self.batch_size
        if self.limit is not None:
            end = min(end, self.limit)
        place_B = np.arange(self.taken, end, dtype=np.int64)
        self.taken = end
        if not self.shuffle:
            return place_B % self.rows
        epoch_B, offset_B = np.divmod(place_B, self.rows)
        rows_B = np.empty_like(place_B)
        for epoch in np.unique(epoch_B):
            of_epoch = epoch_B == epoch
            rows_B[of_epoch] = permute(offset_B[of_epoch], self.rows, self.seed, int(epoch))
        return rows_B


def permute(offset_B: npt.NDArray[np.int64], rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Where a random permutation of `range(rows)` sends the given offsets.

    A Feistel network over the next even power of two, walked until it lands inside `rows`: O(1) memory for
    any number of rows, random access for exact resume, and the same order whatever library or device.
    """
    half_bits = max(1, ((rows - 1).bit_length() + 1) // 2)
    half_mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    keys = _mix(np.arange(_ROUNDS, dtype=np.uint64) + _mix(_mix(np.uint64(seed)) + np.uint64(epoch)))
    value_B = offset_B.astype(np.uint64)
    outside_B = np.ones(len(value_B), dtype=bool)
    while outside_B.any():
        left, right = value_B[outside_B] >> shift, value_B[outside_B] & half_mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & half_mask)
        value_B[outside_B] = (left << shift) | right
        outside_B = value_B >= rows
    return value_B.astype(np.int64)


def _mix(value: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    """The splitmix64 finaliser: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(value, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        final: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
        return final
