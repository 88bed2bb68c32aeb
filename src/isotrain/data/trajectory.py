"""A prompt and the policy's response, token by token: the unit from rollout to training.

P: prompt tokens, N: response tokens, T: both.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Trajectory:
    """Token ids are the truth: they are never turned into text and back."""

    row: int
    """Number of the prompt in its store."""
    prompt_index: int
    """Index of the drawn prompt over the whole run; responses to one draw are a group."""
    sample: int
    """Which response of the group."""
    seed: int
    """What it was sampled with."""
    prompt_length: int
    tokens_T: npt.NDArray[np.int32]
    """The prompt, then the response."""
    mask_N: npt.NDArray[np.bool_]
    """Which response tokens the policy wrote; the others came from tools or environments."""
    logp_N: npt.NDArray[np.float32]
    """Log-probs of the policy that sampled, at its sampling temperature; 0 where it did not write."""
    version_N: npt.NDArray[np.int32]
    """Version of the weights that wrote each token."""
    finished: bool
    """Whether the policy ended the response itself; otherwise it was cut at the longest allowed."""

    def __post_init__(self) -> None:
        response = len(self.tokens_T) - self.prompt_length
        assert response == len(self.mask_N) == len(self.logp_N) == len(self.version_N)

    def __len__(self) -> int:
        return len(self.tokens_T)

    @property
    def response_N(self) -> npt.NDArray[np.int32]:
        return self.tokens_T[self.prompt_length :]


def sample_seed(run_seed: int, prompt_index: int, sample: int) -> int:
    """What a response is sampled with: 31 bits, from the run, the draw and the response alone."""
    digest = hashlib.sha256(f"{run_seed} {prompt_index} {sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
