"""From hidden states to log-probs and entropies, without ever holding all tokens' logits.

N: loss-bearing tokens, C: tokens of a chunk, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F


def _chunks(count: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, count)) for start in range(0, count, chunk))


def _logits(hidden_CD: torch.Tensor, weight_VD: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    logits_CV = F.linear(hidden_CD, weight_VD).float()
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


class _HeadGradient:
    """Gradients of a head collected chunk by chunk; the weight's is summed in float32."""

    def __init__(self, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, needs_weight: bool) -> None:
        self.hidden_ND = torch.empty_like(hidden_ND)
        # Zero, not None, where no token bears loss: in a reduction all ranks must bring the same tensors.
        empty = needs_weight and len(hidden_ND) == 0
        self.weight_VD: torch.Tensor | None = torch.zeros_like(weight_VD) if empty else None

    def add(self, part: slice, grad_CD: torch.Tensor, grad_VD: torch.Tensor | None = None) -> None:
        """Take in what one chunk gives: its own hidden states' gradient, and its share of the weight's."""
        self.hidden_ND[part] = grad_CD
        if grad_VD is not None:
            # The first chunk's gradient is kept as it is: a single chunk needs no float32 copy.
            self.weight_VD = grad_VD if self.weight_VD is None else self.weight_VD.float().add_(grad_VD)


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
        leaf_VD = weight_VD.detach().requires_grad_(ctx.needs_input_grad[1])
        share = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        for part in _chunks(len(targets_N), chunk):
            hidden_CD = hidden_ND[part].detach().requires_grad_()
            with torch.enable_grad():
                nll_C = F.cross_entropy(_logits(hidden_CD, leaf_VD), targets_N[part], reduction="none")
                value = nll_C.sum() / loss_tokens
            inputs = (hidden_CD, leaf_VD) if leaf_VD.requires_grad else (hidden_CD,)
            gradient.add(part, *torch.autograd.grad(value, inputs))
            share += value.detach()
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


class LogpsAndEntropies(torch.autograd.Function):
    """Entropies that are not wanted are not computed, and mean nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        chunk: int,
        temperature: float,
        entropies: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logp_N, norm_N, entropy_N = _all_chunks(
            hidden_ND, weight_VD, targets_N, chunk, temperature, entropies
        )
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, norm_N, entropy_N)
        ctx.chunk, ctx.temperature = chunk, temperature
        ctx.set_materialize_grads(False)  # an output that nothing depends on is seen as such
        return logp_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, grad_logp_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, grad_logp_N, grad_entropy_N)


def _all_chunks(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    chunk: int,
    temperature: float,
    entropies: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of the targets, the logarithm of each softmax's denominator, and entropies if wanted."""
    logp_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_ND.device)
    norm_N, entropy_N = torch.empty_like(logp_N), torch.empty_like(logp_N)
    for part in _chunks(len(targets_N), chunk):
        logits_CV = _logits(hidden_ND[part], weight_VD, temperature)
        targets_C1 = targets_N[part, None]
        norm_N[part] = logits_CV.gather(1, targets_C1)[:, 0]
        logp_CV = torch.log_softmax(logits_CV, -1)
        logp_N[part] = logp_CV.gather(1, targets_C1)[:, 0]
        if entropies:
            entropy_N[part] = -torch.linalg.vecdot(torch.exp(logp_CV, out=logits_CV), logp_CV)
        del logits_CV, logp_CV  # before the next chunk's are there
    return logp_N, norm_N.sub_(logp_N), entropy_N


def _backward(
    ctx: Any, grad_logp_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """The logits are computed a second time; what was learnt about them in the forward pass is not."""
    hidden_ND, weight_VD, targets_N, norm_N, entropy_N = ctx.saved_tensors
    if grad_logp_N is None:
        grad_logp_N = torch.zeros_like(norm_N)
    gradient = _HeadGradient(hidden_ND, weight_VD, ctx.needs_input_grad[1])
    for part in _chunks(len(targets_N), ctx.chunk):
        logits_CV = _logits(hidden_ND[part], weight_VD, ctx.temperature)
        logp_CV, grad_logp_C1 = logits_CV.sub_(norm_N[part, None]), grad_logp_N[part, None]
        # d logp / d logits = onehot - p, and d entropy / d logits = -p (logp + entropy).
        if grad_entropy_N is None:
            grad_CV = logp_CV.exp_().mul_(-grad_logp_C1)
        else:
            grad_CV = (logp_CV + entropy_N[part, None]).mul_(grad_entropy_N[part, None]).add_(grad_logp_C1)
            grad_CV.mul_(logp_CV.exp_()).neg_()
        grad_CV.scatter_add_(1, targets_N[part, None], grad_logp_C1)
        grad_CV = (grad_CV if ctx.temperature == 1.0 else grad_CV.div_(ctx.temperature)).to(weight_VD.dtype)
        grad_VD = grad_CV.t() @ hidden_ND[part] if ctx.needs_input_grad[1] else None
        gradient.add(part, grad_CV @ weight_VD, grad_VD)
        del logits_CV, logp_CV, grad_CV
    grad_weight = None if gradient.weight_VD is None else gradient.weight_VD.to(weight_VD.dtype)
    return gradient.hidden_ND, grad_weight, None, None, None, None
