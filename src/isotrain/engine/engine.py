"""The training engine: updates and inference over packed micro-batches, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import get_total_norm

from isotrain.data.packing import PackedBatch
from isotrain.engine.world import World
from isotrain.models.config import active_experts
from isotrain.models.packed import Backbone, TokenHead
from isotrain.models.weights import shard_of

Result = TypeVar("Result")


class InferenceModel:
    """A model used for inference: a frozen reference or reward model, or the one that an engine updates."""

    def __init__(self, model: Backbone, world: World) -> None:
        self.model = model
        self.world = world
        # As they are sharded now: while sharded weights are whole, the modules show others.
        self.parameters = dict(model.named_parameters())
        self.on_host: dict[int, torch.UntypedStorage] | None = None
        """Host copies while the model is offloaded, by `id` of the tensor whose memory they are."""
        self.host_copies: dict[int, torch.UntypedStorage] = {}
        """Buffers in host memory that `offload` uses again."""
        self.before_reuse: Callable[[], object] = lambda: None
        """Called before they change: a checkpoint may still be written from them."""

    def forward(self, batch: PackedBatch, objective: Callable[[Any], Result]) -> Result:
        """The objective applied to the model's head (`TokenHead` or `ScalarHead`) over one micro-batch."""
        assert self.on_host is None, "the model is offloaded"
        if self.model.replay is not None and batch.routes is not None and not batch.routes.as_seen:
            self.model.replay.check(batch.routes.chosen)
        on_device = batch.to(self.world.device)
        result: Result = self.model(
            on_device.tokens_T,
            on_device.positions_T,
            on_device.lengths,
            on_device.predict_N,
            on_device.targets_N,
            objective,
            on_device.continues,
            # By name: traces of a run are digests of the others, and this repeats one of them.
            predict_on_host_N=on_device.predict_on_host_N,
            **({} if on_device.routes is None else {"routes": on_device.routes}),
            **({} if on_device.pictures is None else {"pictures": on_device.pictures}),
        )
        return result

    @torch.no_grad()
    def infer(self, batches: Sequence[PackedBatch], objective: Callable[[Any], Result]) -> list[Result]:
        """The objective's results, without gradients or dropout; ranks must bring equally many batches."""
        self.model.eval()
        results = [self.forward(batch, objective) for batch in batches]
        self.reshard()
        return results

    def reshard(self) -> None:
        """Let go of weights that were made whole and that no backward pass is waiting for."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


Loss = Callable[[TokenHead, int], torch.Tensor]
"""A micro-batch's share of the step's loss, given the loss-bearing tokens of the whole step."""

Objective = Callable[[Any], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""From the model's head (`TokenHead` or `ScalarHead`) to a micro-batch's shares of the loss and of metrics.

Shares add up over micro-batches and ranks; those of metrics are single numbers without gradients.
"""

Work = Sequence[tuple[PackedBatch, Objective]]
"""This rank's micro-batches of an update, each with its objective."""


@dataclass(frozen=True)
class UpdateResult:
    loss: float
    grad_norm: float
    applied: bool
    """False where the loss or the gradient was not finite: the weights are as before."""
    metrics: dict[str, float]
    router_aux_loss: float | None = None
    """For a mixture whose routers are balanced: a mean over the step's tokens, before its coefficient."""
    overflowed: bool = False
    """Whether the gradient was not finite because the loss scale was too large."""
    scale_metrics: Mapping[str, float] = field(default_factory=dict)
    """Where the loss is scaled: by how much, and how many updates that has cost so far."""


@dataclass
class LossScale:
    """A factor of the loss that keeps gradients within float16, which has nothing below 6e-8 or above 65504.

    Course and constants are those of torch's GradScaler. That looks for infinities in each gradient, and
    exchanges what it finds for each mesh; the norm, which all ranks have, says the same of all gradients.
    Being a power of two, the scale changes no digit.
    """

    value: float = 2.0**16
    finite: int = 0
    """Updates with finite gradients since the last change."""
    skipped: int = 0
    """Updates that were lost because the scale was too large."""

    growth_interval: ClassVar[int] = 2000

    def update(self, finite: bool) -> None:
        self.finite = self.finite + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.finite == self.growth_interval:
            self.value, self.finite = 2 * self.value, 0


class Probe(Protocol):
    """Looks on while an engine trains, and leaves every number bitwise the same."""

    def around_update(self, engine: TrainingEngine) -> AbstractContextManager[None]:
        """Entered around each update; in the first, a probe may put hooks on the model and the optimizer."""


class TrainingEngine(InferenceModel):
    def __init__(
        self,
        model: Backbone,
        optimizer: torch.optim.Optimizer,
        world: World,
        max_grad_norm: float,
        loss_scale: LossScale | None = None,
    ) -> None:
        super().__init__(model, world)
        self.optimizer, self.max_grad_norm, self.loss_scale = optimizer, max_grad_norm, loss_scale
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.probes: list[Probe] = []

    @property
    def parameter_counts(self) -> tuple[int, int]:
        """Parameters that take part in matrix products, and the trained ones among them.

        An input embedding of its own is a table: looking up costs nothing. Of a mixture's experts,
        those count that a token is sent to.
        """
        pretrained = self.model.pretrained
        table, head = pretrained.get_input_embeddings(), pretrained.get_output_embeddings()
        tied = head is not None and head.weight is table.weight
        share = active_experts(pretrained.config)
        multiplied = [
            (int(p.numel() * share) if ".experts." in name else p.numel(), p.requires_grad)
            for name, p in self.model.named_parameters()
            if tied or p is not table.weight
        ]
        return sum(count for count, _ in multiplied), sum(count for count, trained in multiplied if trained)

    def update(self, work: Work | Callable[[], Work], lr: float) -> UpdateResult:
        """One optimizer update; every rank must bring equally many micro-batches and the same metrics.

        `work` is a function where making it takes a model, such as a reference: probes look on at that too.
        """
        with ExitStack() as probes:
            for probe in self.probes:
                probes.enter_context(probe.around_update(self))
            return self._update(work() if callable(work) else work, lr)

    def _update(self, work: Work, lr: float) -> UpdateResult:
        self.model.train()
        scale = self.loss_scale
        self.model.loss_scale = 1.0 if scale is None else scale.value
        total, sums = self._zero(), dict[str, torch.Tensor]()
        balance, imbalance = self.model.balance, self._zero()
        tokens = self._real_tokens([batch for batch, _ in work]) if balance else 1
        for number, (batch, objective) in enumerate(work, start=1):
            if self.world.shape.replicas > 1 and isinstance(self.model, FSDPModule):
                # Between machines, gradients travel once.
                self.model.set_requires_all_reduce(number == len(work))
            share, metrics = self.forward(batch, objective)
            if balance is not None and self.model.imbalance is not None:
                batch_imbalance = self.model.imbalance * (_real_tokens(batch) / tokens)
                share, self.model.imbalance = share + balance.coefficient * batch_imbalance, None
                imbalance += batch_imbalance.detach()
            share.backward(None if scale is None else torch.full_like(share, scale.value))
            total += share.detach()
            for name, value in metrics.items():
                sums.setdefault(name, self._zero()).add_(value.detach())
        grad_norm = self.clip_gradients()
        loss, uneven, *values = self.world.total(torch.stack([total, imbalance, *sums.values()]).tolist())
        # Both numbers are the same on every rank, and so is the decision.
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group.get("lr_ratio", 1.0)
            self.optimizer.step()
        self.optimizer.zero_grad()
        means = dict(zip(sums, values, strict=True))
        result = UpdateResult(loss, grad_norm, finite, means, uneven if balance else None)
        return result if scale is None else _rescaled(scale, result)

    def step(self, batches: Sequence[PackedBatch], loss: Loss, lr: float) -> UpdateResult:
        """One supervised update: `loss` gives each micro-batch's share; the tokens with loss are a metric."""
        loss_tokens = self._loss_tokens(batches)

        def objective(head: TokenHead) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return loss(head, loss_tokens), {}

        result = self.update([(batch, objective) for batch in batches], lr)
        return replace(result, metrics={"loss_tokens": float(loss_tokens)})

    def evaluate(self, steps: Iterable[Sequence[PackedBatch]], loss: Loss) -> float:
        """The mean loss per loss-bearing token over all given steps."""
        weighted, tokens = 0.0, 0
        for batches in steps:
            loss_tokens = self._loss_tokens(batches)
            shares = self.infer(batches, lambda head, n=loss_tokens: loss(head, n))  # type: ignore[misc]
            (step_loss,) = self.world.total([torch.stack(shares).sum().item()])
            weighted += step_loss * loss_tokens
            tokens += loss_tokens
        return weighted / tokens

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float32, device=self.world.device)

    def _real_tokens(self, batches: Sequence[PackedBatch]) -> int:
        return int(self.world.total([sum(map(_real_tokens, batches))])[0])

    def _loss_tokens(self, batches: Sequence[PackedBatch]) -> int:
        return int(self.world.total([sum(batch.loss_tokens for batch in batches)])[0])

    def clip_gradients(self) -> float:
        """Scales the gradients down to `max_grad_norm`; returns the global norm they had.

        On local shards: each rank's norm is taken once and only that number is exchanged. A scale of the loss
        is taken out of both.
        """
        grads = [shard_of(p.grad).local for p in self.trained.values() if p.grad is not None]
        norm = get_total_norm(grads)
        if self.world.size > 1:
            squares = norm.square()
            # Over all copies of the weights, in one sum: they must not differ in a digit, nor in a decision.
            dist.all_reduce(squares)
            norm = (squares / self.world.shape.replicas).sqrt()
        if self.loss_scale is not None:
            torch._foreach_div_(grads, self.loss_scale.value)
            norm = norm / self.loss_scale.value
        if self.max_grad_norm > 0:
            factor = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(grads, factor)
        return norm.item()


def _rescaled(scale: LossScale, result: UpdateResult) -> UpdateResult:
    """An update's result with the scale that it had; the next one's follows from it."""
    before = scale.value
    # The loss comes from the forward pass, which has no scale. At 1 the scale does nothing.
    overflowed = not result.applied and math.isfinite(result.loss) and before > 1
    scale.update(result.applied)
    scale.skipped += overflowed
    metrics = {"loss_scale": before, "loss_scale_skipped": float(scale.skipped)}
    return replace(result, overflowed=overflowed, scale_metrics=metrics)


def _real_tokens(batch: PackedBatch) -> int:
    """Tokens of samples; a micro-batch without loss stands in for missing work."""
    return len(batch.tokens_T) if batch.loss_tokens else 0
