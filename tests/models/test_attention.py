from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from isotrain.device import varlen
from isotrain.device.npu import OPERATORS
from isotrain.errors import ModelError
from isotrain.models import attention
from isotrain.models.attention import SEGMENTS, flash_attention, fused_attention, segment_attention
from isotrain.models.context import context_attention

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


def explicit(
    qkv: list[torch.Tensor], window: int = TOKENS, scale: float = 8**-0.5, cap: float | None = None
) -> torch.Tensor:
    """Softmax over one mask for the whole pack, written out."""
    query, key, value = qkv
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    segment_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    distance_TT = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None]
    seen_TT = (segment_T[:, None] == segment_T) & (distance_TT >= 0) & (distance_TT < window)
    scores = (query @ key.transpose(2, 3)) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
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


@pytest.mark.parametrize("block", [1, 50, 1 << 27])
@pytest.mark.parametrize("window", [TOKENS, 2])
def test_a_soft_cap_of_scores(
    device_type: str, window: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query by query, in blocks of a few, and all at once."""
    monkeypatch.setattr(attention, "CAPPED_SCORES", block)
    qkv, reference = inputs(device_type, 2), inputs(device_type, 2)
    out = attend(qkv, sliding_window=None if window == TOKENS else window, softcap=0.7)
    expected = explicit(reference, window, cap=0.7)
    assert (expected - explicit(reference, window)).abs().max() > 0.1
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    out.square().sum().backward()
    expected.square().sum().backward()
    for x, y in zip(qkv, reference, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=2e-6)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("largest_mask", [0, 1 << 26])
@pytest.mark.parametrize("window", [None, 1, 3, 4])
def test_a_segment_sees_the_one_that_it_continues(
    device_type: str,
    window: int | None,
    largest_mask: int,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of two tokens and one of one that continue a prompt of three, against each with its own prompt.

    Under a mask, and where the prompt's queries go along instead.
    """
    monkeypatch.setattr(attention, "LARGEST_MASK", largest_mask)
    order = [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1, 2, 7, 8]
    qkv, reference = inputs(device_type, 2), inputs(device_type, 2)
    options = {"sliding_window": window, "softcap": softcap}
    shared = attend(qkv, (3, 2, 2, 1, 1), segment_continues=(-1, 0, 0, 0, -1), **options)
    repeated = attend([x[:, :, order] for x in reference], (5, 5, 4, 1), **options)
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


class Attention(nn.Module):
    """The layer of a model that calls attention."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="odd")
        for name, value in attributes.items():
            setattr(self, name, value)


Call = Callable[..., tuple[torch.Tensor, None]]
FLASH_BORDERS = {"cu_seq_lens_q": torch.tensor([0, 3, 4, 9]), "cu_seq_lens_k": torch.tensor([0, 3, 4, 9])}

# Each function that transformers may call, what it needs besides, and what its errors say to set.
FUNCTIONS: dict[str, tuple[Call, dict[str, Any], str]] = {
    "segments": (segment_attention, {"segment_lengths": LENGTHS}, r"set model\.attention=padded"),
    "fused": (
        partial(fused_attention, OPERATORS.attention),
        {"segment_lengths": LENGTHS},
        r"set model\.fused=off",
    ),
    "fused-padded": (
        partial(fused_attention, OPERATORS.attention, padded=True),
        {},
        r"set model\.fused=off",
    ),
    "context": (context_attention, {"split": object()}, r"set device\.mesh\.context to 1, and"),
    "flash": (partial(flash_attention, True), FLASH_BORDERS, r"set model\.attention=sdpa"),
    "flash without windows": (partial(flash_attention, False), FLASH_BORDERS, r"model\.attention=sdpa"),
}

UNKNOWN: dict[str, Any] = {
    "softcap": 30.0,
    "s_aux": torch.zeros(4),
    "position_bias": torch.zeros(1, 4, TOKENS, TOKENS),
    "head_mask": torch.ones(4),
    "indices": torch.zeros(1, TOKENS, 2),
    "output_attentions": True,
    "some_future_argument": 1,
}


@pytest.mark.parametrize(
    ("function", "name"), [pair for pair in product(FUNCTIONS, UNKNOWN) if pair != ("segments", "softcap")]
)
def test_arguments_that_are_not_computed_are_refused(function: str, name: str, device_type: str) -> None:
    call, needed, remedy = FUNCTIONS[function]
    with pytest.raises(ModelError, match=f"of model type 'odd' uses '{name}'.*{remedy}"):
        call(Attention(), *inputs(device_type), None, **needed, **{name: UNKNOWN[name]})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_mask_of_the_models_own_is_refused(function: str, device_type: str) -> None:
    call, needed, remedy = FUNCTIONS[function]
    mask = torch.zeros(1, 1, TOKENS, TOKENS, device=device_type)
    with pytest.raises(ModelError, match=f"model type 'odd' has an attention mask of its own.*{remedy}"):
        call(Attention(), *inputs(device_type), mask, **needed)


@pytest.mark.parametrize("said_by", ["the call", "the layer"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_attention_that_is_not_causal_is_refused(function: str, said_by: str) -> None:
    call, needed, remedy = FUNCTIONS[function]
    layer = Attention(is_causal=said_by == "the call")
    said = {"is_causal": False} if said_by == "the call" else {}
    with pytest.raises(ModelError, match=f"attention of model type 'odd' is not causal.*{remedy}"):
        call(layer, *inputs("cpu"), None, **needed, **said)


@pytest.mark.parametrize("function", ["segments", "fused", "context", "flash"])
def test_a_model_that_does_not_hand_borders_on_is_refused(function: str) -> None:
    """Its samples would see each other."""
    with pytest.raises(
        ModelError, match=r"'odd' does not tell its attention where packed samples begin; set "
    ):
        FUNCTIONS[function][0](Attention(), *inputs("cpu"), None)


@pytest.mark.parametrize("function", ["fused", "fused-padded", "flash without windows"])
def test_a_window_that_an_operator_does_not_have_is_refused(function: str) -> None:
    call, needed, remedy = FUNCTIONS[function]
    with pytest.raises(ModelError, match=f"'sliding_window'.*{remedy}"):
        call(Attention(), *inputs("cpu"), None, **needed, sliding_window=5)


def test_arguments_without_effect_change_nothing(device_type: str) -> None:
    qkv = inputs(device_type)
    unset = {**dict.fromkeys(UNKNOWN), "output_attentions": False, "is_causal": True, "use_cache": False}
    assert torch.equal(attend(qkv, **unset, position_ids=torch.arange(TOKENS)), attend(qkv))


def test_lengths_must_add_up() -> None:
    with pytest.raises(RuntimeError, match="split_sizes to sum exactly to 9"):
        attend(inputs("cpu"), (3, 1, 4))


def test_transformers_knows_it() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS[SEGMENTS] is segment_attention
    assert SEGMENTS not in ALL_MASK_ATTENTION_FUNCTIONS, "no mask is built for it"


def reference_64(
    qkv: list[torch.Tensor], lengths: tuple[int, ...], continues: tuple[int, ...], window: int | None
) -> torch.Tensor:
    """Attention in float64, one query at a time."""
    query_HTD, key_HTD, value_HTD = (x[0].detach().cpu().double() for x in qkv)
    groups = query_HTD.shape[0] // key_HTD.shape[0]
    key_HTD, value_HTD = (x.repeat_interleave(groups, dim=0) for x in (key_HTD, value_HTD))
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    out_TD = []
    for start, length, trunk in zip(starts, lengths, continues, strict=True):
        before = list(range(starts[trunk], starts[trunk] + lengths[trunk])) if trunk >= 0 else []
        for token in range(start, start + length):
            seen = (before + list(range(start, token + 1)))[-(window or TOKENS) :]
            scores_HK = torch.einsum("hd,hkd->hk", query_HTD[:, token], key_HTD[:, seen]) * 8**-0.5
            out_TD.append(torch.einsum("hk,hkd->hd", scores_HK.softmax(-1), value_HTD[:, seen]))
    return torch.stack(out_TD)[None]


TRUNKS = ((3, 2, 2, 1, 1), (-1, 0, 0, 0, -1))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_kernels_of_devices_get_no_mask_with_grouped_heads(
    device_type: str, key_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No efficient kernel takes both: the one that does keeps the scores of all tokens, 49 GB for 8 x 11k."""
    calls = []
    real = attention.F.scaled_dot_product_attention

    def watched(*args: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append((args[0].shape[1] != args[1].shape[1], options))
        return real(*args, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", watched)
    qkv = inputs(device_type, key_heads)
    out = attend(qkv, TRUNKS[0], segment_continues=TRUNKS[1], sliding_window=window)
    assert any(options["attn_mask"] is not None for _, options in calls)
    assert all(options["enable_gqa"] is grouped for grouped, options in calls)
    if device_type != "cpu":
        assert not any(options["enable_gqa"] for _, options in calls if options["attn_mask"] is not None)
    torch.testing.assert_close(out.cpu().double(), reference_64(qkv, *TRUNKS, window), rtol=0, atol=1e-6)


def bottom_right(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What torch's kernel is documented to compute; it has none for the host."""
    assert window_size[1] == 0 and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
    assert enable_gqa == (query.shape[1] != key.shape[1])
    groups, out = query.shape[1] // key.shape[1], []
    for index in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[index] : cu_seq_q[index + 1]].transpose(0, 1)
        k, v = (x[cu_seq_k[index] : cu_seq_k[index + 1]].transpose(0, 1) for x in (key, value))
        k, v = (x.repeat_interleave(groups, dim=0) for x in (k, v))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        if window_size[0] >= 0:
            seen = seen.triu(k.shape[1] - q.shape[1] - window_size[0])
        scores = (q @ k.transpose(1, 2)) * (scale or q.shape[-1] ** -0.5)
        out.append((scores.masked_fill(~seen, -math.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("segments", [TRUNKS, (LENGTHS, (-1, -1, -1))])
def test_the_kernel_for_packed_samples(
    segments: tuple[tuple[int, ...], tuple[int, ...]],
    key_heads: int,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One call for the whole pack, equal to attention sample by sample and to float64."""
    lengths, continues = segments
    options = {"segment_continues": continues if max(continues) >= 0 else (), "sliding_window": window}
    expected_qkv, qkv = inputs("cpu", key_heads), inputs("cpu", key_heads)
    expected = attend(expected_qkv, lengths, **options)
    monkeypatch.setattr(varlen, "takes", lambda query, dropout: True)
    monkeypatch.setattr(varlen, "_kernel", lambda: bottom_right)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", None)
    out = attend(qkv, lengths, **options)
    torch.testing.assert_close(out.double(), reference_64(qkv, *segments, window), rtol=0, atol=1e-6)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    out.square().sum().backward()
    expected.square().sum().backward()
    for x, y in zip(qkv, expected_qkv, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=2e-6)


@pytest.mark.skipif(varlen._kernel() is None, reason="this torch has no such kernel")
def test_torchs_kernel_takes_our_arguments() -> None:
    """Shapes and gradients of the real function; only a CUDA device computes with it."""
    query, key = (
        torch.randn(9, heads, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (4, 2)
    )
    out = varlen.attend(query, key, key, query_ends=(3, 9), key_ends=(3, 9), scale=0.5, window=4)
    assert out.shape == query.shape
    out.sum().backward()
    assert key.grad is not None and key.grad.shape == key.shape


def test_where_the_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda:
        is_cuda, device = True, torch.device("cuda", 0)

        def __init__(self, dtype: torch.dtype, size: int) -> None:
            self.dtype, self.shape = dtype, torch.Size([1, 4, 9, size])

    def takes(dtype: torch.dtype = torch.bfloat16, size: int = 128, dropout: float = 0.0) -> bool:
        return varlen.takes(OnCuda(dtype, size), dropout)  # type: ignore[arg-type]

    monkeypatch.setattr(varlen, "_kernel", lambda: bottom_right)
    monkeypatch.setattr(varlen, "_is_new_enough", lambda device: True)
    assert takes() and takes(torch.float16)
    assert not takes(torch.float32) and not takes(size=264) and not takes(size=12) and not takes(dropout=0.1)
    assert not varlen.takes(torch.zeros(1, 4, 9, 128, dtype=torch.bfloat16), 0.0)
    monkeypatch.setattr(varlen, "_kernel", lambda: None)  # torch 2.10's has neither scale nor groups
    assert not takes()
