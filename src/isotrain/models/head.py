"""From hidden states to token log-probs, without ever holding all tokens' logits.

N: loss-bearing tokens, C: tokens of a chunk, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class TokenHead:
    """The language-model head over the positions that predict loss-bearing tokens."""

    hidden_ND: torch.Tensor
    weight_VD: torch.Tensor
    targets_N: torch.Tensor
    chunk: int

    def nll_share(self, loss_tokens: int) -> torch.Tensor:
        """These tokens' share of the mean negative log-likelihood over `loss_tokens` tokens.

        Its gradient is taken while the logits are there: it costs no second pass over them.
        """
        if not torch.is_grad_enabled():
            return -self.logps().sum() / loss_tokens
        share: torch.Tensor = _NllShare.apply(  # type: ignore[no-untyped-call]
            self.hidden_ND, self.weight_VD, self.targets_N, loss_tokens, self.chunk
        )
        return share

    def logps(self) -> torch.Tensor:
        """The targets' log-probs, float32; the logits are computed again in the backward pass."""
        logp_N: torch.Tensor = _Logps.apply(  # type: ignore[no-untyped-call]
            self.hidden_ND, self.weight_VD, self.targets_N, self.chunk
        )
        return logp_N


def _nll(hidden_CD: torch.Tensor, weight_VD: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden_CD, weight_VD).float(), targets_C, reduction="none")


def _chunks(count: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, count)) for start in range(0, count, chunk))


class _HeadGradient:
    """Gradients of a head collected chunk by chunk; the weight's is summed in float32."""

    def __init__(self, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, needs_weight: bool) -> None:
        self.hidden_ND = torch.empty_like(hidden_ND)
        # Zero, not None, where no token bears loss: in a reduction all ranks must bring the same tensors.
        empty = needs_weight and len(hidden_ND) == 0
        self.weight_VD: torch.Tensor | None = torch.zeros_like(weight_VD) if empty else None
        self.needs_weight = needs_weight
        self._leaf_VD = weight_VD.detach().requires_grad_(needs_weight)

    def differentiate(
        self,
        part: slice,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor,
        reduce: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Adds the gradient of one chunk's reduced losses and returns their value."""
        with torch.enable_grad():
            hidden_CD = hidden_ND[part].detach().requires_grad_()
            value = reduce(_nll(hidden_CD, self._leaf_VD, targets_N[part]))
        inputs = (hidden_CD, self._leaf_VD) if self.needs_weight else (hidden_CD,)
        grads = torch.autograd.grad(value, inputs)
        self.hidden_ND[part] = grads[0]
        if self.needs_weight:
            # The first chunk's gradient is kept as it is: a single chunk needs no float32 copy.
            self.weight_VD = grads[1] if self.weight_VD is None else self.weight_VD.float().add_(grads[1])
        return value.detach()


class _NllShare(torch.autograd.Function):
    """The gradient is known before the backward pass, because nothing after the sum depends on its terms.

    The division happens before the head's matrix products, as it does in a loop written out by hand: with a
    single chunk the two agree bit for bit.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        loss_tokens: int,
        chunk: int,
    ) -> torch.Tensor:
        gradient = _HeadGradient(hidden_ND, weight_VD, needs_weight=ctx.needs_input_grad[1])
        share = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        for part in _chunks(len(targets_N), chunk):
            share += gradient.differentiate(
                part, hidden_ND, targets_N, lambda nll_C: nll_C.sum() / loss_tokens
            )
        ctx.gradient, ctx.weight_dtype = gradient, weight_VD.dtype
        return share

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = ctx.gradient
        grad_weight = None
        if gradient.weight_VD is not None:
            grad_weight = _scaled(gradient.weight_VD, grad).to(ctx.weight_dtype)
        return _scaled(gradient.hidden_ND, grad), grad_weight, None, None, None


def _scaled(tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    # A loss that is the last word has gradient 1. Where looking is free, that saves a pass over the weight.
    return tensor if factor.is_cpu and factor.item() == 1.0 else tensor * factor


class _Logps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, chunk: int
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N)
        ctx.chunk = chunk
        logp_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_ND.device)
        for part in _chunks(len(targets_N), chunk):
            logp_N[part] = -_nll(hidden_ND[part], weight_VD, targets_N[part])
        return logp_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N = ctx.saved_tensors
        gradient = _HeadGradient(hidden_ND, weight_VD, needs_weight=ctx.needs_input_grad[1])
        for part in _chunks(len(targets_N), ctx.chunk):
            gradient.differentiate(part, hidden_ND, targets_N, lambda nll_C: (nll_C * -grad_N[part]).sum())  # noqa: B023
        grad_weight = None if gradient.weight_VD is None else gradient.weight_VD.to(weight_VD.dtype)
        return gradient.hidden_ND, grad_weight, None, None
