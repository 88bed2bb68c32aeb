"""A sample: token ids and, for each of them, whether the loss is taken on it.

T: tokens of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Sample:
    tokens_T: npt.NDArray[np.int32]
    mask_T: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        assert self.tokens_T.shape == self.mask_T.shape and self.tokens_T.ndim == 1

    def __len__(self) -> int:
        return len(self.tokens_T)
