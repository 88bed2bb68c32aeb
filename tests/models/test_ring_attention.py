from __future__ import annotations

import pytest
import torch

from isotrain.models import ring
from isotrain.models.ring import Block, attend, attend_backward

HEADS, GROUPS, QUERIES, KEYS, SIZE, SCALE = 4, 2, 9, 9, 8, 0.3


def tensors(device_type: str) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(HEADS, QUERIES, SIZE), (GROUPS, KEYS, SIZE), (GROUPS, KEYS, SIZE), (HEADS, QUERIES, SIZE)]
    return [torch.randn(shape, generator=draw, dtype=torch.float32).to(device_type) for shape in shapes]


def visible(block: Block, window: int | None) -> torch.Tensor:
    distance = torch.arange(QUERIES)[:, None] - torch.arange(KEYS) + (block.distance or 0)
    if block.causal:
        return distance >= 0
    if block.distance is None:
        return torch.ones(QUERIES, KEYS, dtype=torch.bool)
    assert window is not None
    return (distance >= 0) & (distance < window)


BLOCKS = [
    (Block(slice(0, QUERIES), slice(0, KEYS)), None),
    (Block(slice(0, QUERIES), slice(0, KEYS), causal=True), None),
    (Block(slice(0, QUERIES), slice(0, KEYS), distance=3), 6),
]


@pytest.mark.parametrize(("block", "window"), BLOCKS)
@pytest.mark.parametrize("scores", [1 << 24, 2 * HEADS * KEYS])
def test_it_is_softmax_attention(
    device_type: str, block: Block, window: int | None, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "LARGEST_SCORES", scores)
    query, key, value, grad = tensors(device_type)
    out, lse = attend(query, key, value, block, SCALE, window)
    leaves = [x.cpu().double().requires_grad_() for x in (query, key, value)]
    many = [x.repeat_interleave(HEADS // GROUPS, dim=0) for x in leaves[1:]]
    logits = (leaves[0] @ many[0].mT * SCALE).masked_fill(~visible(block, window), -torch.inf)
    expected = logits.softmax(-1) @ many[1]
    torch.testing.assert_close(out.cpu().double(), expected.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), logits.logsumexp(-1).detach(), atol=1e-6, rtol=1e-5)
    expected.backward(grad.cpu().double())
    found = attend_backward(grad, query, key, value, out.to(query.dtype), lse, block, SCALE, window)
    for one, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(one.cpu().double(), leaf.grad, atol=1e-6, rtol=1e-5)


def test_a_query_that_sees_no_key_adds_nothing(device_type: str) -> None:
    query, key, value, grad = tensors(device_type)
    block = Block(slice(0, QUERIES), slice(0, KEYS), distance=KEYS)
    out, lse = attend(query, key, value, block, SCALE, 4)
    blind = ~visible(block, 4).any(-1)
    assert blind.any() and not blind.all()
    assert torch.equal(out.cpu()[:, blind], torch.zeros(HEADS, int(blind.sum()), SIZE))
    assert torch.isneginf(lse.cpu()[:, blind]).all()
    lse_of_all = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)  # others see them elsewhere
    grads = attend_backward(grad, query, key, value, out, lse_of_all, block, SCALE, 4)
    assert all(bool(one.isfinite().all()) for one in grads) and not grads[0].cpu()[:, blind].any()
