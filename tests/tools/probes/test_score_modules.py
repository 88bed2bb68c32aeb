"""Plain modules with known constants: the estimate is the mistake, and honest rounding gives none.

R: rows, D: their size, T: tokens, H: heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

from isotrain.tools.probes.score_tests.fit import Fit, FittedConstant, fit
from isotrain.tools.probes.score_tests.modules import (
    AttentionSample,
    Norm,
    Rope,
    check_attention,
    check_norm,
    check_rotary,
    rounded,
    turned_exactly,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()


def close(found: FittedConstant, truth: float, widths: float = 4.5, floor: float = 2e-6) -> bool:
    assert found.error is not None
    return abs(found.off - truth) <= widths * found.error + floor


def norm_fit(
    seed: int, dtype: str, *, rows: int = 200, epsilon: float = 1e-6, gain: float = 1.0, bias: float = 0.0
) -> tuple[Fit, float]:
    """An RMSNorm that is rounded once, as fused ones are, with other constants than 1e-6, 1 and 0."""
    x_RD, weight_D = norm_inputs(seed, dtype, rows)
    wide_RD = x_RD.float()
    normed_RD = wide_RD * torch.rsqrt(wide_RD.square().mean(-1, keepdim=True) + epsilon)
    y_RD = (weight_D.float() * normed_RD * gain + bias).to(x_RD.dtype)
    return check_norm(Norm(wide(x_RD), wide(weight_D), 1e-6), wide(y_RD), dtype)


def norm_inputs(seed: int, dtype: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    sizes_R1 = 10 ** (torch.rand(rows, 1, generator=draw) * 1.5 - 3)
    x_RD = torch.randn(rows, 32, generator=draw) * sizes_R1
    weight_D = 1 + 0.1 * torch.randn(32, generator=draw)
    return x_RD.to(DTYPES[dtype]), weight_D.to(DTYPES[dtype])


def attention_fit(
    seed: int, dtype: str, *, samples: int = 24, scale: float = 1.0, gain: float = 1.0, length: int = 12
) -> tuple[Fit, float]:
    """Two heads over one key head, in plain operators; the scale is a multiple of the right one."""
    draw = torch.Generator().manual_seed(seed)
    size, kind = 16, DTYPES[dtype]
    angle_TD = torch.arange(length)[:, None] * 100.0 ** -(torch.arange(size // 2) / (size // 2))
    cos, sin = (torch.cat([f(angle_TD)] * 2, -1).to(kind) for f in (torch.cos, torch.sin))
    # Queries and keys of real models have a mean, so that roundings of keys are shared by queries.
    means = torch.randn(2, size, generator=draw)
    made = []
    for _ in range(samples):
        query = (means[0] + torch.randn(1, 2, length, size, generator=draw)).to(kind)
        key = (means[1] + torch.randn(1, length, size, generator=draw)).to(kind)
        value = torch.randn(1, length, size, generator=draw).to(kind)

        def turn(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat([-second, first], -1) * sin

        scores = turn(query).float() @ turn(key).float().transpose(-1, -2)[:, None] * (scale * size**-0.5)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        output = (weights @ value.float()[:, None] * gain).to(kind)
        turns = (wide(cos), wide(sin))
        parts = [wide(x) for x in (query, key, value)]
        exactly = partial(turned_exactly, dtype)
        made.append(AttentionSample(*parts, turns, turns, seen.numpy(), wide(output), exactly))
    return check_attention(made, size**-0.5, dtype)


def rotary_fit(dtype: str, rope: Rope, base: float, gain: float = 1.0) -> tuple[Fit, float]:
    positions = torch.arange(300).repeat(2)
    frequencies = torch.from_numpy(rope.frequencies(base)).float()
    angle = positions[:, None].float() * frequencies
    cos, sin = (wide((f(angle) * gain).to(DTYPES[dtype])) for f in (torch.cos, torch.sin))
    return check_rotary(rope, wide(positions), cos, sin, dtype)


def test_rounding_is_that_of_torch() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 100
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 0.0])
    both = torch.cat([numbers, ties])
    for name, kind in {**DTYPES, "float16": torch.float16}.items():
        np.testing.assert_array_equal(rounded(wide(both), name), wide(both.to(kind)))


def test_a_line_has_textbook_errors() -> None:
    draw = np.random.default_rng(0)
    slope_NC, noise_N = draw.normal(size=(4000, 2)), draw.normal(size=4000)
    observed_N = slope_NC @ [0.5, 0.0] + noise_N
    found = fit(lambda off_C: (slope_NC @ off_C, slope_NC), observed_N, np.arange(4000), np.zeros(2))
    exact, *_ = np.linalg.lstsq(slope_NC[:, :1], observed_N, rcond=None)
    assert found.estimates[0].off == pytest.approx(exact[0], rel=1e-9)
    assert found.estimates[0].error == pytest.approx(1 / math.sqrt(4000), rel=0.06)
    # Numbers that come in equal groups of ten say no more than one of each.
    tenfold = np.repeat(slope_NC[:400], 10, axis=0)
    again_N = tenfold @ [0.5, 0.0] + np.repeat(noise_N[:400], 10)
    grouped = fit(
        lambda off_C: (tenfold @ off_C, tenfold), again_N, np.repeat(np.arange(400), 10), np.zeros(2)
    )
    assert grouped.estimates[0].error == pytest.approx(1 / math.sqrt(400), rel=0.15)
    assert grouped.clusters == 400


def test_constants_that_cannot_be_told() -> None:
    x_N = np.random.default_rng(0).normal(size=500)
    slope_NC = np.stack([x_N, np.zeros(500)], -1)
    found = fit(lambda off_C: (slope_NC @ off_C, slope_NC), x_N, np.arange(500), np.zeros(2))
    assert found.estimates[0].off == pytest.approx(1.0) and found.estimates[1].error is None
    alike_NC = np.stack([x_N, 2 * x_N], -1)
    noisy_N = x_N + 0.01 * np.random.default_rng(1).normal(size=500)
    found = fit(lambda off_C: (alike_NC @ off_C, alike_NC), noisy_N, np.arange(500), np.zeros(2))
    first = next(one for one in found.estimates if one.confused)
    assert len(first.confused) == 1, "either of two constants that do the same"
    lonely = fit(lambda off_C: (slope_NC @ off_C, slope_NC), x_N, np.zeros(500, np.int64), np.zeros(2))
    assert lonely.estimates[0].error is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_finds_a_norms_epsilon_and_gain(dtype: str) -> None:
    (epsilon, gain, bias), _ = norm_fit(0, dtype)[0].estimates, None
    assert close(epsilon, 0) and close(gain, 0) and close(bias, 0)
    wrong, rounding = norm_fit(1, dtype, epsilon=1e-5)
    assert close(wrong.estimates[0], 9.0, floor=1e-3) and close(wrong.estimates[1], 0.0)
    assert wrong.rest < (2 if dtype == "bfloat16" else 16) * rounding, "what is left is rounding"
    louder = norm_fit(2, dtype, gain=1.01)[0].estimates
    assert close(louder[1], 0.01) and not louder[1].confused
    shifted = norm_fit(3, dtype, bias=0.02)[0].estimates
    assert shifted[2].off == pytest.approx(0.02, rel=0.1) and close(shifted[0], 0.0, floor=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.02, 0.98, 1.5, 0.25])
def test_finds_an_attention_scale(dtype: str, scale: float) -> None:
    found, rounding = attention_fit(0, dtype, scale=scale)
    by_scale, gain, bias = found.estimates
    assert close(by_scale, scale - 1) and by_scale.error is not None and by_scale.error < 1e-3
    assert close(gain, 0.0) and close(bias, 0.0) and not by_scale.confused
    # Sums of float32 are rounded more than once.
    assert found.rest < (2 if dtype == "bfloat16" else 16) * rounding


@pytest.mark.parametrize("dtype", DTYPES)
def test_finds_an_attention_gain(dtype: str) -> None:
    by_scale, gain, _ = attention_fit(0, dtype, gain=0.99)[0].estimates
    assert close(gain, -0.01) and close(by_scale, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rope",
    [
        Rope("default", 1e4, 32),
        Rope("linear", 1e4, 32, 8.0),
        Rope("llama3", 5e5, 32, 8.0, 1.0, 4.0, 64.0),
    ],
    ids=lambda rope: rope.kind,
)
def test_finds_a_rotary_base(dtype: str, rope: Rope) -> None:
    for factor in (1.0, 1.01, 0.9, 50.0):
        base, gain = rotary_fit(dtype, rope, rope.base * factor)[0].estimates
        assert base.off == pytest.approx(factor - 1, abs=1e-3 * factor), factor
        assert gain.off == pytest.approx(0.0, abs=1e-3)
    base, gain = rotary_fit(dtype, rope, rope.base, gain=1.05)[0].estimates
    # Cosines of long waves are all near 1, and 1.05 itself is rounded to the nearest number.
    nearest = 2.0**-8 if dtype == "bfloat16" else 1e-6
    assert gain.off == pytest.approx(0.05, abs=nearest) and base.off == pytest.approx(0.0, abs=1e-3)


def test_llama3_frequencies_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from isotrain.tools.probes.score_tests.families import rope_constants

    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=rope)
    stated = rope_constants(config, None)
    theirs = LlamaRotaryEmbedding(config).inv_freq
    np.testing.assert_allclose(stated.frequencies(stated.base), wide(theirs), rtol=1e-6)


def test_another_mistake_leaves_a_rest() -> None:
    """Uniform attention is no attention with another scale that rounding explains."""
    honest, honest_rounding = attention_fit(0, "bfloat16")
    assert honest.rest < 2 * honest_rounding
    draw = np.random.default_rng(0)
    x_RD = draw.normal(size=(100, 32))
    wrong_RD = np.where(draw.random(x_RD.shape) < 0.1, 0.0, x_RD / 0.9)  # dropout
    found, rounding = check_norm(Norm(x_RD, np.ones(32), 1e-6), wrong_RD, "bfloat16")
    assert found.rest > 20 * rounding


@pytest.mark.heavy
def test_honest_bfloat16_is_off_as_rarely_as_designed() -> None:
    """Intervals of 5 %, so that few hundred seeds can tell; all constants of norm and attention."""
    seeds, outside, tests = 150, 0, 0
    for seed in range(seeds):
        for found, _ in (
            norm_fit(seed, "bfloat16", rows=60),
            attention_fit(seed, "bfloat16", samples=24, length=8),
        ):
            quantile = stats.t.isf(0.025, found.clusters - 1)
            for one in found.estimates:
                assert one.error is not None
                outside += abs(one.off) > quantile * one.error
                tests += 1
    assert tests == 6 * seeds
    # 5 % of 900 is 45; three standard deviations of a binomial are 20.
    assert 25 <= outside <= 65, outside


def test_products_of_bfloat16_are_too_small_on_average() -> None:
    """Why a gain has a floor: an honest norm that rounds twice is off by 0.01 % beyond its interval."""
    gains = []
    for seed in range(20):
        x_RD, weight_D = norm_inputs(seed, "bfloat16", 400)
        normed_RD = x_RD.float() * torch.rsqrt(x_RD.float().square().mean(-1, keepdim=True) + 1e-6)
        y_RD = weight_D * normed_RD.to(torch.bfloat16)
        found, _ = check_norm(Norm(wide(x_RD), wide(weight_D), 1e-6), wide(y_RD), "bfloat16")
        gains.append(found.estimates[1].off)
    assert -2e-4 < np.mean(gains) < -3e-5 and np.abs(gains).max() < 2.5e-4, "half of the floor"
