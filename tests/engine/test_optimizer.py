"""Moments that are kept elsewhere, or shorter, between updates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isotrain.engine.optimizer import StoredMoments, round_stochastically
from isotrain.models.weights import Shard


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


def whole(x: torch.Tensor) -> Shard:
    return Shard(x, tuple(x.shape), (0,) * x.ndim)


@pytest.mark.parametrize("bucket_bytes", [1, 600, 1 << 30])
def test_it_is_adamw_whatever_the_buckets(monkeypatch: pytest.MonkeyPatch, bucket_bytes: int) -> None:
    monkeypatch.setattr("isotrain.engine.optimizer.BUCKET_BYTES", bucket_bytes)
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
    rounded = round_stochastically(whole(x), salt=5)
    assert rounded.dtype == torch.bfloat16
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    up = (rounded > 1).float().mean()
    assert up == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / len(x)) ** 0.5)
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-126])
    assert torch.equal(round_stochastically(whole(exact), salt=1), exact.bfloat16())


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((1000,), (slice(400, 1000),)),
        ((40, 25), (slice(10, 30), slice(0, 25))),
        ((5, 6, 8), (slice(0, 5), slice(2, 4), slice(0, 8))),
        ((5, 6, 8), (slice(1, 3), slice(2, 4), slice(4, 8))),
        ((1, 16), (slice(0, 1), slice(8, 16))),
        ((3, 8), (slice(3, 3), slice(0, 8))),
    ],
)
def test_noise_is_of_element_and_update(shape: tuple[int, ...], part: tuple[slice, ...]) -> None:
    """A part is rounded as it is within the whole, along whatever dimension ranks split it."""
    x = torch.rand(shape)
    rounded = round_stochastically(whole(x), salt=3)
    own = Shard(x[part].clone(), shape, tuple(one.start for one in part))
    assert torch.equal(rounded[part], round_stochastically(own, salt=3)), "as on another rank"
    assert torch.equal(rounded.flatten(), round_stochastically(whole(x.flatten()), salt=3))
    assert not torch.equal(rounded, round_stochastically(whole(x), salt=4))


def test_noise_of_elements_beyond_32_bits() -> None:
    """Numbers wrap around in the same way, wherever a part begins."""
    shape, x = (1 << 20, 1 << 14), torch.rand(2, 1 << 14)
    both = round_stochastically(Shard(x, shape, (300_000, 0)), salt=3)
    second = round_stochastically(Shard(x[1:], shape, (300_001, 0)), salt=3)
    right = round_stochastically(Shard(x[:, 5000:].clone(), shape, (300_000, 5000)), salt=3)
    assert torch.equal(both[1:], second) and torch.equal(both[:, 5000:], right)


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
