"""Moments that are kept elsewhere, or shorter, between updates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isotrain.engine import stored_moments
from isotrain.engine.stored_moments import StoredMoments, round_stochastically


def optimise(
    kind: type[torch.optim.AdamW], steps: int, **settings: object
) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = kind(model.parameters(), lr=1e-2, betas=(0.9, 0.999), **settings)  # type: ignore[arg-type]
    for step in range(steps):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("bucket_bytes", [1, 600, 1 << 30])
def test_it_is_adamw_whatever_the_buckets(monkeypatch: pytest.MonkeyPatch, bucket_bytes: int) -> None:
    monkeypatch.setattr(stored_moments, "BUCKET_BYTES", bucket_bytes)
    plain, _ = optimise(torch.optim.AdamW, 5, fused=True)
    stored, optimizer = optimise(StoredMoments, 5, fused=True, dtype=torch.float32, on_host=True)
    assert all(map(torch.equal, plain.parameters(), stored.parameters()))
    assert len(optimizer.param_groups) == 1 and len(optimizer.param_groups[0]["params"]) == 4


def test_bfloat16_moments_follow_the_rounded_recursion() -> None:
    """After each update the moments are rounded, and the next update starts from what was kept."""
    _, optimizer = optimise(StoredMoments, 3, dtype=torch.bfloat16, on_host=False)
    for state in optimizer.state.values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    plain, _ = optimise(torch.optim.AdamW, 3)
    short, _ = optimise(StoredMoments, 3, dtype=torch.bfloat16, on_host=False)
    for a, b in zip(plain.parameters(), short.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)
    assert not all(map(torch.equal, plain.parameters(), short.parameters()))


def test_rounding_is_to_a_neighbour_and_right_on_average() -> None:
    x = torch.full((1 << 16,), 1.0 + 0.3 * 2**-7)  # three tenths of the way between two neighbours
    rounded = round_stochastically(x, 0, salt=5)
    assert rounded.dtype == torch.bfloat16
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    up = (rounded > 1).float().mean()
    assert up == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / len(x)) ** 0.5)
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-126])
    assert torch.equal(round_stochastically(exact, 0, salt=1), exact.bfloat16())


def test_noise_is_of_element_and_update() -> None:
    x = torch.rand(1000)
    whole = round_stochastically(x, 0, salt=3)
    assert torch.equal(whole[400:], round_stochastically(x[400:].clone(), 400, salt=3)), "as on another rank"
    assert not torch.equal(whole, round_stochastically(x, 0, salt=4))


def test_a_second_moment_falls_when_gradients_vanish() -> None:
    """Rounded to the nearest it would not: 0.999 times a number is that number again in bfloat16."""
    parameter = nn.Parameter(torch.zeros(4096))
    optimizer = StoredMoments([parameter], lr=0.0, betas=(0.9, 0.999), dtype=torch.bfloat16, on_host=False)
    steps = 400
    for step in range(steps):
        parameter.grad = torch.full_like(parameter, 1.0 if step == 0 else 0.0)
        optimizer.step()
    mean = optimizer.state[parameter]["exp_avg_sq"].float().mean()
    assert mean == pytest.approx(0.001 * 0.999 ** (steps - 1), rel=0.02)
