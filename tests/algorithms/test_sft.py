from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from isotrain.algorithms.sft import SUPERVISED_LOSSES, sft_loss
from isotrain.models.packed import TokenHead
from isotrain.recipe.schema import SftSection


class FixedHead:
    """A head that gives its tokens these probabilities."""

    def __init__(self, *probabilities: float) -> None:
        self.nll_N = -torch.tensor(probabilities).log()

    def nll_share(self, loss_tokens: int) -> torch.Tensor:
        return self.nll_N.sum() / loss_tokens


def test_mean_by_hand() -> None:
    # (ln 2 + ln 4 + ln 8) / 3 = 2 ln 2
    assert sft_loss(FixedHead(1 / 2, 1 / 4, 1 / 8), 3).item() == pytest.approx(2 * math.log(2))


def test_shares_add_up_however_the_tokens_are_split() -> None:
    parts = [FixedHead(1 / 2), FixedHead(), FixedHead(1 / 4, 1 / 8)]
    assert sum(sft_loss(part, 3).item() for part in parts) == pytest.approx(2 * math.log(2))


def test_an_even_guess_costs_the_logarithm_of_the_vocabulary(device_type: str) -> None:
    hidden_ND = torch.randn(6, 4, device=device_type)
    head = TokenHead(hidden_ND, torch.zeros(100, 4, device=device_type), torch.arange(6).to(device_type), 4)
    assert sft_loss(head, 6).item() == pytest.approx(math.log(100), rel=1e-6)


def test_every_supervised_algorithm_of_a_recipe_has_a_loss() -> None:
    assert set(SUPERVISED_LOSSES) == set(get_args(SftSection.model_fields["name"].annotation))
    assert SUPERVISED_LOSSES["sft"] is sft_loss
