from __future__ import annotations

import pytest
import torch

from isotrain.algorithms.advantages.grpo import grpo
from isotrain.algorithms.dapo import informative, overlong_penalty


def test_groups_of_equal_rewards_teach_nothing(device_type: str) -> None:
    # Prompt 5 has equal rewards, prompt 2 has different ones, prompt 9 has a single response.
    rewards_R = torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1, 3.0], device=device_type)
    group_R = torch.tensor([5, 2, 5, 2, 5, 9], device=device_type)
    keep_R = informative(rewards_R, group_R)
    assert keep_R.tolist() == [False, True, False, True, False, True]
    assert keep_R.device.type == device_type
    assert torch.equal(keep_R, grpo(rewards_R, group_R) != 0)


def test_all_or_nothing_informative() -> None:
    group_R = torch.tensor([0, 0, 1, 1])
    assert not informative(torch.ones(4), group_R).any()
    assert informative(torch.tensor([1.0, 0.0, 0.0, -1.0]), group_R).all()
    assert informative(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_overlong_penalty_by_hand() -> None:
    # At most 100 tokens, the last 20 of which cost: 80 is free, 85 costs 5/20, 100 costs everything.
    lengths = [0, 80, 85, 90, 100, 120]
    assert overlong_penalty(lengths, max_length=100, buffer=20).tolist() == [0, 0, -0.25, -0.5, -1, -1]
    halved = overlong_penalty(lengths, max_length=100, buffer=20, factor=0.5)
    assert halved.tolist() == pytest.approx([0, 0, -0.125, -0.25, -0.5, -0.5])
