"""From hidden states to log-probs and entropies, without ever holding all tokens' logits.

N: loss-bearing tokens, C: tokens of a chunk, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F


def _chunks(count: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, count)) for start in range(0, count, chunk))


def _logits(hidden_CD: torch.Tensor, weight_VD: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    logits_CV = F.linear(hidden_CD, weight_VD).float()
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _nll(logits_CV: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_CV, targets_C, reduction="none")


class _HeadGradient:
    """Gradients of a head collected chunk by chunk; the weight's is summed in float32."""

    def __init__(
        self, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, needs_weight: bool, temperature: float = 1.0
    ) -> None:
        self.hidden_ND = torch.empty_like(hidden_ND)
        # Zero, not None, where no token bears loss: in a reduction all ranks must bring the same tensors.
        empty = needs_weight and len(hidden_ND) == 0
        self.weight_VD: torch.Tensor | None = torch.zeros_like(weight_VD) if empty else None
        self.needs_weight = needs_weight
        self.temperature = temperature
        self._leaf_VD = weight_VD.detach().requires_grad_(needs_weight)

    def differentiate(
        self, part: slice, hidden_ND: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Adds the gradient of what one chunk's logits are reduced to, and returns its value."""
        with torch.enable_grad():
            hidden_CD = hidden_ND[part].detach().requires_grad_()
            value = reduce(_logits(hidden_CD, self._leaf_VD, self.temperature))
        inputs = (hidden_CD, self._leaf_VD) if self.needs_weight else (hidden_CD,)
        grads = torch.autograd.grad(value, inputs)
        self.hidden_ND[part] = grads[0]
        if self.needs_weight:
            # The first chunk's gradient is kept as it is: a single chunk needs no float32 copy.
            self.weight_VD = grads[1] if self.weight_VD is None else self.weight_VD.float().add_(grads[1])
        return value.detach()


class NllShare(torch.autograd.Function):
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
                part,
                hidden_ND,
                lambda logits_CV: _nll(logits_CV, targets_N[part]).sum() / loss_tokens,  # noqa: B023
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


class Logps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        chunk: int,
        temperature: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N)
        ctx.chunk, ctx.temperature = chunk, temperature
        logp_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_ND.device)
        for part in _chunks(len(targets_N), chunk):
            logp_N[part] = -_nll(_logits(hidden_ND[part], weight_VD, temperature), targets_N[part])
        return logp_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, grad_N, None)


class LogpsAndEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        chunk: int,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N)
        ctx.chunk, ctx.temperature = chunk, temperature
        ctx.set_materialize_grads(False)  # an output that nothing depends on is seen as such
        logp_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_ND.device)
        entropy_N = torch.empty_like(logp_N)
        for part in _chunks(len(targets_N), chunk):
            logits_CV = _logits(hidden_ND[part], weight_VD, temperature)
            logp_N[part], entropy_N[part] = _LogpAndEntropy.apply(  # type: ignore[no-untyped-call]
                logits_CV, targets_N[part]
            )
        return logp_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_logp_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, grad_logp_N, grad_entropy_N)


def _backward(
    ctx: Any, grad_logp_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """The logits are computed a second time, and only the outputs that the loss depends on."""
    hidden_ND, weight_VD, targets_N = ctx.saved_tensors
    gradient = _HeadGradient(hidden_ND, weight_VD, ctx.needs_input_grad[1], ctx.temperature)
    for part in _chunks(len(targets_N), ctx.chunk):

        def reduce(logits_CV: torch.Tensor, part: slice = part) -> torch.Tensor:
            if grad_entropy_N is None:
                assert grad_logp_N is not None
                return (_nll(logits_CV, targets_N[part]) * -grad_logp_N[part]).sum()
            logp_C, entropy_C = _LogpAndEntropy.apply(  # type: ignore[no-untyped-call]
                logits_CV, targets_N[part]
            )
            value: torch.Tensor = (entropy_C * grad_entropy_N[part]).sum()
            return value if grad_logp_N is None else value + (logp_C * grad_logp_N[part]).sum()

        gradient.differentiate(part, hidden_ND, reduce)
    grad_weight = None if gradient.weight_VD is None else gradient.weight_VD.to(weight_VD.dtype)
    return gradient.hidden_ND, grad_weight, None, None, None


class _LogpAndEntropy(torch.autograd.Function):
    """With its gradient written out: autograd would hold twice as many tensors of a chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any, logits_CV: torch.Tensor, targets_C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logp_CV = torch.log_softmax(logits_CV, -1)
        entropy_C = -logp_CV.exp().mul_(logp_CV).sum(-1)
        ctx.save_for_backward(logp_CV, targets_C, entropy_C)
        return logp_CV.gather(1, targets_C[:, None])[:, 0], entropy_C

    @staticmethod
    def backward(
        ctx: Any, grad_logp_C: torch.Tensor, grad_entropy_C: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """d logp / d logits = onehot - p, and d entropy / d logits = -p (logp + entropy)."""
        logp_CV, targets_C, entropy_C = ctx.saved_tensors
        grad_CV = (logp_CV + entropy_C[:, None]).mul_(grad_entropy_C[:, None]).add_(grad_logp_C[:, None])
        grad_CV.mul_(logp_CV.exp()).neg_()
        return grad_CV.scatter_add_(1, targets_C[:, None], grad_logp_C[:, None]), None
