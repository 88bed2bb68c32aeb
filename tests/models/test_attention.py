from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from isotrain.errors import ModelError
from isotrain.models import attention
from isotrain.models.attention import SEGMENTS, segment_attention

LENGTHS = (3, 1, 5)
TOKENS = sum(LENGTHS)


def inputs(device: str, key_heads: int = 4) -> list[torch.Tensor]:
    """Queries of four heads, keys and values of `key_heads`, as a model hands them over."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(1, heads, TOKENS, 8) for heads in (4, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]


def attend(qkv: list[torch.Tensor], lengths: tuple[int, ...] = LENGTHS, **options: object) -> torch.Tensor:
    out, weights = segment_attention(nn.Module(), *qkv, None, segment_lengths=lengths, **options)  # type: ignore[arg-type]
    assert weights is None
    return out


def explicit(qkv: list[torch.Tensor], window: int = TOKENS, scale: float = 8**-0.5) -> torch.Tensor:
    """Softmax over one mask for the whole pack, written out."""
    query, key, value = qkv
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    segment_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    distance_TT = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None]
    seen_TT = (segment_T[:, None] == segment_T) & (distance_TT >= 0) & (distance_TT < window)
    scores = (query @ key.transpose(2, 3)) * scale
    scores = scores.masked_fill(~seen_TT.to(query.device), -math.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_a_packed_sample_is_bitwise_the_sample_alone(device_type: str, key_heads: int) -> None:
    qkv = inputs(device_type, key_heads)
    packed = attend(qkv)
    assert packed.shape == (1, TOKENS, 4, 8) and packed.is_contiguous()
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        alone = attend([x[:, :, part] for x in qkv], (length,))
        assert torch.equal(packed[:, part], alone)
        start += length


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_it_is_attention_under_a_block_mask(device_type: str, key_heads: int) -> None:
    qkv, reference = inputs(device_type, key_heads), inputs(device_type, key_heads)
    out, expected = attend(qkv), explicit(reference)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    out.square().sum().backward()
    expected.square().sum().backward()
    for x, y in zip(qkv, reference, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=2e-6)


def test_short_samples_on_the_host_are_computed_in_float32() -> None:
    half = [x.detach().bfloat16() for x in inputs("cpu", 2)]
    assert torch.equal(attend(half), attend([x.float() for x in half]).bfloat16())


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6])
def test_sliding_window(device_type: str, window: int) -> None:
    qkv = inputs(device_type, 2)
    out = attend(qkv, sliding_window=window)
    torch.testing.assert_close(out, explicit(qkv, window), rtol=0, atol=1e-6)
    if window == 1:  # each token sees itself only
        torch.testing.assert_close(out, qkv[2].repeat_interleave(2, dim=1).transpose(1, 2))


@pytest.mark.parametrize("largest_mask", [0, 1 << 26])
@pytest.mark.parametrize("window", [None, 1, 3, 4])
def test_a_segment_sees_the_one_that_it_continues(
    device_type: str, window: int | None, largest_mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of two tokens and one of one that continue a prompt of three, against each with its own prompt.

    Under a mask, and where the prompt's queries go along instead.
    """
    monkeypatch.setattr(attention, "LARGEST_MASK", largest_mask)
    order = [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1, 2, 7, 8]
    qkv, reference = inputs(device_type, 2), inputs(device_type, 2)
    shared = attend(qkv, (3, 2, 2, 1, 1), segment_continues=(-1, 0, 0, 0, -1), sliding_window=window)
    repeated = attend([x[:, :, order] for x in reference], (5, 5, 4, 1), sliding_window=window)
    places = [0, 1, 2, 3, 4, 8, 9, 13, 14]  # the first copy of the prompt, and what follows each
    torch.testing.assert_close(shared, repeated[:, places], rtol=0, atol=1e-6)
    shared.square().sum().backward()
    repeated[:, places].square().sum().backward()
    for x, y in zip(qkv, reference, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=2e-6)


def test_scaling(device_type: str) -> None:
    qkv = inputs(device_type)
    torch.testing.assert_close(attend(qkv, scaling=0.7), explicit(qkv, scale=0.7), rtol=0, atol=1e-6)


def test_gradients_stay_inside_a_segment(device_type: str) -> None:
    qkv = inputs(device_type)
    attend(qkv)[:, 4:].sum().backward()  # the third sample
    for x in qkv:
        assert x.grad is not None and not x.grad[:, :, :4].any()
    assert qkv[2].grad[:, :, 4:].all(), "the last token sees all of its own sample"


def test_dropout_is_applied(device_type: str) -> None:
    torch.manual_seed(0)
    qkv = inputs(device_type)
    qkv[2] = torch.ones_like(qkv[2])
    out = attend(qkv, dropout=0.5)
    # A token that sees only itself keeps its value, doubled, or loses it.
    assert set(out[:, [0, 3, 4]].flatten().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_other_kinds_of_attention_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"'{name}'.*set model.attention=padded"):
        attend(inputs("cpu"), **{name: 30.0})
    attend(inputs("cpu"), **{name: None}, is_causal=True)


def test_lengths_must_add_up() -> None:
    with pytest.raises(RuntimeError):
        attend(inputs("cpu"), (3, 1, 4))


def test_transformers_knows_it() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS[SEGMENTS] is segment_attention
    assert SEGMENTS not in ALL_MASK_ATTENTION_FUNCTIONS, "no mask is built for it"
