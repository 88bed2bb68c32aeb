from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from isotrain.data.packing import pack_trajectories
from isotrain.data.trajectory import Trajectory, sample_seed


def trajectory(prompt: list[int], response: list[int], mask: list[int], logp: list[float]) -> Trajectory:
    return Trajectory(
        row=0,
        prompt_index=0,
        sample=0,
        seed=0,
        prompt_length=len(prompt),
        tokens_T=np.array(prompt + response, np.int32),
        mask_N=np.array(mask, np.bool_),
        logp_N=np.array(logp, np.float32),
        version_N=np.zeros(len(mask), np.int32),
        finished=True,
    )


FIRST = trajectory([1, 2, 3], [4, 5, 6], [1, 0, 1], [-0.5, 0, -1.5])
EMPTY = trajectory([7, 8], [], [], [])
LAST = trajectory([9], [10], [1], [-2.5])


def test_three_trajectories_by_hand() -> None:
    batch = pack_trajectories([FIRST, EMPTY, LAST], [5, 0, 3])
    packed = batch.packed
    assert packed.tokens_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] and packed.lengths == (6, 2, 2)
    # Also the token that the policy did not write is there, so that values and log-probs stay aligned.
    assert packed.predict_N.tolist() == [2, 3, 4, 8] and packed.targets_N.tolist() == [4, 5, 6, 10]
    assert batch.lengths == (3, 0, 1) and batch.index == (5, 0, 3)
    assert batch.mask_N.tolist() == [True, False, True, True] and batch.mask_N.dtype == torch.bool
    assert batch.rollout_logp_N.tolist() == [-0.5, 0, -1.5, -2.5]
    assert batch.rollout_logp_N.dtype == torch.float32


@pytest.mark.parametrize("trajectories", [[], [EMPTY], [EMPTY, EMPTY]])
def test_no_response_tokens(trajectories: list[Trajectory]) -> None:
    batch = pack_trajectories(trajectories, range(len(trajectories)))
    assert batch.packed.loss_tokens == 0 and len(batch.packed.tokens_T) >= 1
    assert batch.lengths == (0,) * len(trajectories)
    assert batch.mask_N.shape == batch.rollout_logp_N.shape == (0,)
    assert batch.mask_N.dtype == torch.bool and batch.rollout_logp_N.dtype == torch.float32


def test_the_batch_has_memory_of_its_own() -> None:
    # Arrays out of an object store are read-only.
    for array in (FIRST.tokens_T, FIRST.mask_N, FIRST.logp_N):
        array.flags.writeable = False
    batch = pack_trajectories([FIRST], [0])
    batch.rollout_logp_N.zero_()
    batch.mask_N.zero_()
    batch.packed.tokens_T.zero_()
    assert FIRST.logp_N[0] == -0.5 and FIRST.mask_N[0] and FIRST.tokens_T[0] == 1


def test_responses_without_a_prompt_are_refused() -> None:
    with pytest.raises(AssertionError, match="first token"):
        pack_trajectories([replace(LAST, prompt_length=0, **_extended())], [0])


def _extended() -> dict[str, np.ndarray]:
    return {
        "mask_N": np.ones(2, np.bool_),
        "logp_N": np.zeros(2, np.float32),
        "version_N": np.zeros(2, np.int32),
    }


def test_to_a_device(device_type: str) -> None:
    batch = pack_trajectories([FIRST, LAST], [0, 1])
    moved = batch.to(torch.device(device_type))
    tensors = (moved.mask_N, moved.rollout_logp_N, moved.packed.tokens_T, moved.packed.targets_N)
    assert all(tensor.device.type == device_type for tensor in tensors)
    assert torch.equal(moved.rollout_logp_N.cpu(), batch.rollout_logp_N)
    assert moved.lengths == (3, 1) and moved.index == (0, 1)


def test_seeds_of_samples() -> None:
    seeds = {
        sample_seed(run, prompt_index, n) for run in range(8) for prompt_index in range(64) for n in range(16)
    }
    assert len(seeds) > 8190, "8,192 of 2^31 meet about once in 60 times"
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert max(seeds) > 2**30, "all 31 bits are used"
    # Written down, because recorded runs are repeated by later versions.
    assert [sample_seed(42, 0, 0), sample_seed(42, 0, 1), sample_seed(2**32 - 1, 10**12, 7)] == [
        371136612,
        1894484200,
        369903078,
    ]
    assert sample_seed(1, 11, 1) != sample_seed(11, 1, 1) != sample_seed(1, 1, 11)
