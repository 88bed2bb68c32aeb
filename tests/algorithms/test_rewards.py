from __future__ import annotations

import pytest
import torch
from steps import LENGTHS, MASK, numbers

from isotrain.algorithms.advantages import grpo
from isotrain.algorithms.rewards import informative, overlong_penalty, token_rewards
from isotrain.algorithms.segments import sums

MASK_N = torch.tensor(MASK).bool()


def test_the_score_is_on_the_last_written_token(device_type: str) -> None:
    scores_R = torch.tensor([1.0, 2.0, 3.0], device=device_type)
    # The second trajectory ends in a tool token: its score is one token earlier.
    result = token_rewards(scores_R, MASK_N.to(device_type), LENGTHS)
    assert result.tolist() == [0, 0, 0, 0, 1.0, 0, 0, 2.0, 0, 3.0]
    assert result.device.type == device_type


def test_penalty_by_hand() -> None:
    # 5 on the last token, minus 0.5 x 2 on both that the policy wrote.
    mask_N, kl_N = torch.tensor([1, 0, 1]).bool(), torch.tensor([2.0, torch.nan, 2.0])
    rewards_N = token_rewards(torch.tensor([5.0]), mask_N, [3], kl_N=kl_N, kl_coefficient=0.5)
    assert rewards_N.tolist() == [-1.0, 0.0, 4.0]


def test_the_sum_is_the_score_minus_the_penalty() -> None:
    scores_R, kl_N = numbers(0, 3), numbers(1)
    rewards_N = token_rewards(scores_R, MASK_N, LENGTHS, kl_N=kl_N, kl_coefficient=0.1)
    expected_R = scores_R - 0.1 * sums(torch.where(MASK_N, kl_N, 0.0), LENGTHS)
    torch.testing.assert_close(sums(rewards_N, LENGTHS), expected_R)


def test_where_nothing_was_written_there_is_no_reward() -> None:
    mask_N = torch.tensor([0, 0, 1]).bool()
    assert token_rewards(torch.tensor([5.0, 6.0]), mask_N, [2, 1]).tolist() == [0.0, 0.0, 6.0]
    assert token_rewards(torch.tensor([5.0]), mask_N[:2], [2]).tolist() == [0.0, 0.0]
    assert token_rewards(torch.zeros(0), mask_N[:0], []).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_other_types_are_promoted(dtype: torch.dtype) -> None:
    result = token_rewards(torch.tensor([1, 0, 1], dtype=dtype), MASK_N, LENGTHS)
    assert result.dtype == torch.float32 and result.sum().item() == 2


def test_rewards_of_turns_by_hand() -> None:
    """A turn's reward stays where it was earned; the last token gets the rest of the score."""
    mask_N, turns_N = torch.tensor([1, 0, 1, 1]).bool(), torch.tensor([0.5, 9.0, 0.0, 0.25])
    given = {"turn_rewards_N": turns_N, "earlier_R": torch.tensor([2.0])}
    # 5 - 0.75 in these turns - 2 in earlier ones is 2.25, beside the 0.25 of the last turn.
    assert token_rewards(torch.tensor([5.0]), mask_N, [4], **given).tolist() == [0.5, 0.0, 0.0, 2.5]


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
