"""AdamW's update in float64: torch's own kernels are right, and arithmetic that is not is measured."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from isotrain.tools.probes.adamw_oracle import UpdateSample

LR = 1e-3


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    # Of a norm: all ones, whose first updates are all of one size.
    return [nn.Parameter(0.1 * torch.randn(300, 400)), nn.Parameter(torch.ones(500))]


def errors(
    optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], spoil: float = 1.0
) -> list[tuple[float, float, float]]:
    """After an update by random gradients, of which the optimizer gets `spoil` times as much."""
    for p in weights:
        p.grad = torch.randn(p.shape) * 1e-2
    samples = [UpdateSample(p, optimizer.state.get(p, {}), optimizer.param_groups[0]) for p in weights]
    before = [p.detach().clone() for p in weights]
    optimizer.step()
    with torch.no_grad():
        for p, w in zip(weights, before, strict=True):
            p.copy_(w + (p - w) * spoil)
    return [sample.errors(p) for sample, p in zip(samples, weights, strict=True)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("lr", [LR, 1e-6])
def test_torchs_adamw_is_right_in_every_step(fused: bool, lr: float) -> None:
    weights = parameters()
    optimizer = torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    for _ in range(3):
        for units, gain, error in errors(optimizer, weights):
            assert units < 4
            assert lr < LR or abs(gain) < max(1e-4, 5 * error)


def test_an_update_that_is_too_large_has_a_gain() -> None:
    weights = parameters()
    optimizer = torch.optim.AdamW(weights, lr=LR, fused=False)
    (_, gain, error), _ = errors(optimizer, weights, spoil=1.01)
    assert gain == pytest.approx(0.01, abs=1e-4) and error < 1e-4


def test_another_optimizer_is_far_off() -> None:
    """Adam adds the decay to the gradient."""
    weights = parameters()
    optimizer = torch.optim.Adam(weights, lr=LR, weight_decay=0.1)
    assert errors(optimizer, weights)[0][0] > 100


def test_no_elements_and_no_update() -> None:
    empty, still = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([empty, still], lr=0.0)
    for units, gain, _ in errors(optimizer, [empty, still]):
        assert units == 0 and gain == 0 and not math.isnan(units)
