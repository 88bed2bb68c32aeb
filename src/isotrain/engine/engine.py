"""The training engine: forward, step and evaluate over packed micro-batches, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from isotrain.data.packing import PackedBatch
from isotrain.engine.world import World
from isotrain.models.head import TokenHead
from isotrain.models.packed import PackedModel
from isotrain.models.shards import shard_of

Loss = Callable[[TokenHead, int], torch.Tensor]
"""A micro-batch's share of the step's loss, given the loss-bearing tokens of the whole step."""


@dataclass(frozen=True)
class StepResult:
    loss: float
    grad_norm: float
    loss_tokens: int
    applied: bool
    """False where the loss or the gradient was not finite: the weights are as before."""


class TrainingEngine:
    def __init__(
        self, model: PackedModel, optimizer: torch.optim.Optimizer, world: World, clip_norm: float
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.world = world
        self.clip_norm = clip_norm
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    @property
    def parameter_counts(self) -> tuple[int, int]:
        """Parameters that take part in matrix products, and the trained ones among them.

        An input embedding of its own is a table: looking up costs nothing.
        """
        causal_lm = self.model.causal_lm
        table, head = causal_lm.get_input_embeddings().weight, causal_lm.get_output_embeddings().weight
        multiplied = [p for p in self.model.parameters() if p is head or p is not table]
        return sum(p.numel() for p in multiplied), sum(p.numel() for p in multiplied if p.requires_grad)

    def step(self, batches: Sequence[PackedBatch], loss: Loss, lr: float) -> StepResult:
        """One optimizer update from this rank's micro-batches; every rank must bring equally many."""
        self.model.train()
        loss_tokens = self._loss_tokens(batches)
        total = torch.zeros((), dtype=torch.float32, device=self.world.device)
        for batch in batches:
            share = self._forward(batch, lambda head: loss(head, loss_tokens))
            share.backward()
            total += share.detach()
        grad_norm = self._clip()
        (step_loss,) = self.world.sum([total.item()])
        # Both numbers are the same on every rank, and so is the decision.
        finite = math.isfinite(step_loss) and math.isfinite(grad_norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(step_loss, grad_norm, loss_tokens, applied=finite)

    @torch.no_grad()
    def evaluate(self, steps: Iterable[Sequence[PackedBatch]], loss: Loss) -> float:
        """The mean loss per loss-bearing token over all given steps."""
        self.model.eval()
        weighted, tokens = 0.0, 0
        for batches in steps:
            loss_tokens = self._loss_tokens(batches)
            shares = [self._forward(batch, lambda head, n=loss_tokens: loss(head, n)) for batch in batches]  # type: ignore[misc]
            (step_loss,) = self.world.sum([torch.stack(shares).sum().item()])
            weighted += step_loss * loss_tokens
            tokens += loss_tokens
        return weighted / tokens

    def _forward(self, batch: PackedBatch, objective: Callable[[TokenHead], torch.Tensor]) -> torch.Tensor:
        on_device = batch.to(self.world.device)
        result: torch.Tensor = self.model(
            on_device.tokens_T,
            on_device.positions_T,
            on_device.lengths,
            on_device.predict_N,
            on_device.targets_N,
            objective,
        )
        return result

    def _loss_tokens(self, batches: Sequence[PackedBatch]) -> int:
        return int(self.world.sum([sum(batch.loss_tokens for batch in batches)])[0])

    def _clip(self) -> float:
        """Scales the gradients down to `clip_norm`; returns the global norm they had.

        On local shards: each rank's norm is taken once and only that number is exchanged.
        """
        grads = [shard_of(p.grad).local for p in self.trained.values() if p.grad is not None]
        norm = get_total_norm(grads)
        if self.world.size > 1:
            squares = norm.square()
            dist.all_reduce(squares)
            norm = squares.sqrt()
        if self.clip_norm > 0:
            factor = torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(grads, factor)
        return norm.item()


def make_optimizer(
    model: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, fused: bool
) -> torch.optim.AdamW:
    """AdamW over the trained parameters; vectors (norms, biases) are not decayed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=fused)
