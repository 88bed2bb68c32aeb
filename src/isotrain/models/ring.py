"""Ring attention: queries stay, keys and values of all parts of the tokens pass by.

Each part's contribution comes with the logarithm of its softmax's denominator, so that contributions add up
to exact attention. In the backward pass keys and values go round once more and collect their gradients.

H: query heads, G: key/value heads, T: tokens of one part, D: head size, Q: queries of a block, K: its keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from isotrain.errors import ModelError
from isotrain.models.block_attention import attend, attend_backward
from isotrain.models.ring_blocks import RingTokens


def ring_attention(
    query_1HTD: torch.Tensor,
    key_1GTD: torch.Tensor,
    value_1GTD: torch.Tensor,
    *,
    tokens: RingTokens,
    group: dist.ProcessGroup,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Causal attention of this rank's part within all parts; returns tokens before heads."""
    if dropout:
        raise ModelError(
            "ring attention has no dropout; set the model's attention_dropout to 0, or "
            "device.mesh.context_attention to ulysses"
        )
    if key_1GTD.shape != value_1GTD.shape:
        raise ModelError(
            "ring attention needs keys and values of one size; set device.mesh.context_attention to ulysses"
        )
    scale = query_1HTD.shape[-1] ** -0.5 if scaling is None else scaling
    out_HTD = _Ring.apply(  # type: ignore[no-untyped-call]
        query_1HTD[0], key_1GTD[0], value_1GTD[0], tokens, group, scale, sliding_window
    )
    result: torch.Tensor = out_HTD.transpose(0, 1)[None]
    return result


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_HTD: torch.Tensor,
        key_GTD: torch.Tensor,
        value_GTD: torch.Tensor,
        tokens: RingTokens,
        group: dist.ProcessGroup,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        own = dist.get_rank(group)
        out_HTD = torch.zeros(query_HTD.shape, dtype=torch.float32, device=query_HTD.device)
        lse_HT = torch.full(out_HTD.shape[:2], -torch.inf, dtype=torch.float32, device=query_HTD.device)
        passing = _Passing(group, tokens, torch.stack([key_GTD, value_GTD]))
        for part, (key, value) in passing.parts():
            for block in tokens.blocks(own, part, window):
                at = block.queries
                more_HQD, more_HQ = attend(
                    query_HTD[:, at], key[:, block.keys], value[:, block.keys], block, scale, window
                )
                _merge(out_HTD[:, at], lse_HT[:, at], more_HQD, more_HQ)
        out_HTD = out_HTD.to(query_HTD.dtype)
        ctx.save_for_backward(query_HTD, key_GTD, value_GTD, out_HTD, lse_HT)
        ctx.tokens, ctx.group, ctx.scale, ctx.window = tokens, group, scale, window
        return out_HTD

    @staticmethod
    def backward(ctx: Any, grad_HTD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_HTD, key_GTD, value_GTD, out_HTD, lse_HT = ctx.saved_tensors
        own = dist.get_rank(ctx.group)
        grad_query_HTD = torch.zeros(query_HTD.shape, dtype=torch.float32, device=query_HTD.device)
        passing = _Passing(ctx.group, ctx.tokens, torch.stack([key_GTD, value_GTD]), gradients=True)
        for part, (key, value) in passing.parts():
            for block in ctx.tokens.blocks(own, part, ctx.window):
                at, seen = block.queries, block.keys
                grad_query, grad_key, grad_value = attend_backward(
                    grad_HTD[:, at],
                    query_HTD[:, at],
                    key[:, seen],
                    value[:, seen],
                    out_HTD[:, at],
                    lse_HT[:, at],
                    block,
                    ctx.scale,
                    ctx.window,
                )
                grad_query_HTD[:, at] += grad_query
                passing.gradient[0, :, seen] += grad_key
                passing.gradient[1, :, seen] += grad_value
        grad_key, grad_value = passing.gradient.to(key_GTD.dtype)
        return grad_query_HTD.to(query_HTD.dtype), grad_key, grad_value, None, None, None, None


class _Passing:
    """Keys and values of all parts one after the other, each handed on while it is used."""

    def __init__(
        self, group: dist.ProcessGroup, tokens: RingTokens, own: torch.Tensor, gradients: bool = False
    ) -> None:
        self._group, self._tokens, self._now = group, tokens, own
        self.gradient = torch.zeros(own.shape if gradients else 0, dtype=torch.float32, device=own.device)
        """Of the keys and values at hand; after the last part, of one's own."""
        self._gradients = gradients

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        size, own = dist.get_world_size(self._group), dist.get_rank(self._group)
        for step in range(size):
            part = (own - step) % size
            following = (part - 1) % size
            waiting = None
            if step + 1 < size:
                incoming = self._room(self._now, following)
                waiting = self._hand_on(self._now, incoming)
            yield part, self._now
            if self._gradients:  # also after the last part: its gradient goes home
                arriving = self._room(self.gradient, following)
                _wait(self._hand_on(self.gradient, arriving))
                self.gradient = arriving
            if waiting is not None:
                _wait(waiting)
                self._now = incoming

    def _room(self, like: torch.Tensor, part: int) -> torch.Tensor:
        return like.new_empty(*like.shape[:2], self._tokens.size(part), like.shape[3])

    def _hand_on(self, given: torch.Tensor, taken: torch.Tensor) -> list[dist.Work]:
        group, size, own = self._group, dist.get_world_size(self._group), dist.get_rank(self._group)
        to, source = (dist.get_global_rank(group, n % size) for n in (own + 1, own - 1))
        return dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, given, to, group), dist.P2POp(dist.irecv, taken, source, group)]
        )


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _merge(
    out_HQD: torch.Tensor, lse_HQ: torch.Tensor, more_HQD: torch.Tensor, more_HQ: torch.Tensor
) -> None:
    """Add a contribution to what is there already, in place."""
    both_HQ = torch.logaddexp(lse_HQ, more_HQ)
    # Where neither sees a key, both are minus infinity, and nothing is added to nothing.
    here_HQ, more_HQ = ((x - both_HQ).nan_to_num(nan=-torch.inf).exp() for x in (lse_HQ, more_HQ))
    out_HQD.mul_(here_HQ[..., None]).add_(more_HQD * more_HQ[..., None])
    lse_HQ.copy_(both_HQ)
