"""The fused operator in packed and padded layout against attention sample by sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from isotrain.device import npu
from isotrain.device.npu import OPERATORS
from isotrain.models.attention import FUSED, FUSED_PADDED, fused_attention, provide, segment_attention

LENGTHS = (3, 1, 5)


def inputs(samples: int = 1, tokens: int = 9, key_heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(samples, heads, tokens, 8) for heads in (4, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator).npu().requires_grad_() for shape in shapes]


def fused(qkv: list[torch.Tensor], **options: object) -> torch.Tensor:
    out, weights = fused_attention(OPERATORS.attention, nn.Module(), *qkv, None, **options)  # type: ignore[arg-type]
    assert weights is None
    return out


def segments(qkv: list[torch.Tensor], lengths: tuple[int, ...], **options: object) -> torch.Tensor:
    return segment_attention(nn.Module(), *qkv, None, segment_lengths=lengths, **options)[0]  # type: ignore[arg-type]


def assert_same(
    qkv: list[torch.Tensor], out: torch.Tensor, reference: list[torch.Tensor], expected: torch.Tensor
) -> None:
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    out.square().sum().backward()
    expected.square().sum().backward()
    for x, y in zip(qkv, reference, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=5e-6)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_packed_attention_equals_segments(key_heads: int, scaling: float | None) -> None:
    qkv, reference = inputs(key_heads=key_heads), inputs(key_heads=key_heads)
    out = fused(qkv, segment_lengths=LENGTHS, scaling=scaling)
    assert out.shape == (1, 9, 4, 8)
    assert_same(qkv, out, reference, segments(reference, LENGTHS, scaling=scaling))


def test_a_segment_sees_the_one_that_it_continues() -> None:
    """Two of two tokens and one of one continue a prompt of three; the last stands alone."""
    lengths, continues = (3, 2, 2, 1, 1), (-1, 0, 0, 0, -1)
    qkv, reference = inputs(), inputs()
    out = fused(qkv, segment_lengths=lengths, segment_continues=continues)
    assert_same(qkv, out, reference, segments(reference, lengths, segment_continues=continues))


def test_padding_changes_nothing_for_real_tokens() -> None:
    """Rows of 5 tokens, the first of which is padded by two: padding changes nothing for real tokens."""
    real = [0, 1, 2, 5, 6, 7, 8, 9]
    qkv, reference = inputs(2, 5), inputs(2, 5)
    packed = [x.transpose(0, 1).flatten(1, 2)[None, :, real] for x in reference]
    assert_same(qkv, fused(qkv, padded=True).flatten(0, 1)[real][None], reference, segments(packed, (3, 5)))


def test_dropout_is_applied() -> None:
    torch.manual_seed(0)
    qkv = inputs()
    qkv[2] = torch.ones_like(qkv[2])
    out = fused(qkv, segment_lengths=LENGTHS, dropout=0.5)
    # A token that sees only itself keeps its value, doubled, or loses it.
    assert set(out[:, [0, 3, 4]].flatten().tolist()) == {0.0, 2.0}


def test_a_gradient_after_a_call_without() -> None:
    """The mask is made once: also when the first call needs no gradient."""
    npu._causal_mask.cache_clear()
    with torch.inference_mode():
        fused(inputs(), segment_lengths=LENGTHS)
    qkv = inputs()
    fused(qkv, segment_lengths=LENGTHS).sum().backward()
    assert qkv[0].grad is not None


def test_transformers_knows_it() -> None:
    provide(OPERATORS.attention)
    for name in (FUSED, FUSED_PADDED):
        assert ALL_ATTENTION_FUNCTIONS[name].func is fused_attention
        assert name not in ALL_MASK_ATTENTION_FUNCTIONS, "no mask is built for it"
