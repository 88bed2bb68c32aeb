"""Muon for the matrices of a model's layers, and AdamW for all other weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

# torch's class calls these on whole matrices only.
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from isotrain.engine.optimizer import StoredMoments, decay_groups, on_one_mesh
from isotrain.models.packed import SCORE, Backbone
from isotrain.models.weights import shard_of
from isotrain.recipe.schema import MuonSection

MOMENTUM = "momentum_buffer"


def make_muon(
    model: Backbone,
    *,
    muon: MuonSection,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    fused: bool,
    state_dtype: torch.dtype,
    moments_on_host: bool,
) -> Muon:
    """Muon over the matrices of the layers, AdamW over the rest. Each update sets the learning rate."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    outside = _outside(model)
    matrices = [p for name, p in trained.items() if _is_matrix(name, p) and id(p) not in outside]
    chosen = {id(p) for p in matrices}
    rest = StoredMoments(
        decay_groups([p for p in trained.values() if id(p) not in chosen], weight_decay),
        dtype=state_dtype,
        on_host=moments_on_host,
        betas=betas,
        eps=eps,
        fused=fused,
    )
    return Muon(on_one_mesh(matrices), rest, weight_decay=weight_decay, muon=muon)


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Experts are stacked: each has a matrix of its own. So are their biases."""
    stacked = parameter.ndim == 3 and ".experts." in name
    return (parameter.ndim == 2 or stacked) and not name.endswith((SCORE, "bias"))


def _outside(model: Backbone) -> set[int]:
    """Embeddings and the head, by `id`: their rows are tokens, which one matrix does not mix."""
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = model.pretrained.get_output_embeddings()
    return {id(p) for module in [*modules, *([head] if head else [])] for p in module.parameters()}


class Muon(torch.optim.Optimizer):
    """torch's Muon over matrices wherever ranks have split them, and AdamW over the rest.

    Newton-Schulz needs whole matrices: of so many as there are ranks, each rank gathers one, computes it, and
    hands the parts back. The same numbers come out on any number of ranks.
    """

    def __init__(
        self,
        matrices: list[list[nn.Parameter]],
        rest: StoredMoments,
        *,
        weight_decay: float,
        muon: MuonSection,
    ) -> None:
        """The parameters of each list are split over the same ranks."""
        same = {"weight_decay": weight_decay, "lr_ratio": muon.lr_ratio, "moments": (MOMENTUM,)}
        groups: list[dict[str, Any]] = [{"params": members, "fused": False, **same} for members in matrices]
        super().__init__([*groups, *rest.param_groups], {})
        # One state and the same groups: whoever reads an optimizer finds all parameters.
        self.rest, self.state = rest, rest.state
        self.matrices, self.muon = self.param_groups[: len(groups)], muon

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.matrices:
            for batch in _batches([p for p in group["params"] if p.grad is not None]):
                self._update(batch, group["lr"], group["weight_decay"])
        self.rest.step()

    def _update(self, batch: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        with self.rest.loaded_moments(batch, (MOMENTUM,)):
            parts = [self._direction(p) for p in batch]
        for p, part in zip(batch, _orthogonalised(batch, parts, self.muon.ns_steps), strict=True):
            weights = shard_of(p.detach()).local
            weights.mul_(1 - lr * weight_decay)
            adjusted = _adjust_lr(lr, self.muon.adjust_lr_fn, p.shape[-2:])
            weights.add_(part.to(weights.device), alpha=-adjusted)

    def _direction(self, parameter: nn.Parameter) -> torch.Tensor:
        """This rank's part of the momentum after this gradient, as Newton-Schulz takes it."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state[MOMENTUM] = torch.zeros_like(parameter.detach())
        state["step"] += 1
        gradient, buffer = shard_of(parameter.grad).local, shard_of(state[MOMENTUM]).local
        buffer.lerp_(gradient, 1 - self.muon.momentum)
        direction = gradient.lerp(buffer, self.muon.momentum) if self.muon.nesterov else buffer
        # With offloaded weights all of this is in host memory, which has no fast products.
        device = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device
        return direction.to(device, torch.bfloat16)


def _batches(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters that are updated together: as many as they are split over, or one."""
    # Sorted: ranks wait for the largest of a batch.
    split = sorted((p for p in parameters if _is_split(p)), key=torch.numel)
    yield from ([p] for p in parameters if not _is_split(p))
    ranks = split[0].device_mesh.shape[-1] if split else 1  # type: ignore[attr-defined]
    for first in range(0, len(split), ranks):
        yield split[first : first + ranks]


def _is_split(parameter: nn.Parameter) -> bool:
    """Whether no rank has a whole matrix of it; of experts, ranks may have some whole ones each."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.shape[-1] == 1:
        return False
    return parameter.ndim == 2 or _dimension(parameter) > 0


def _dimension(parameter: DTensor) -> int:
    """Along which it is split over the last dimension of its mesh; over others there are copies."""
    dimension: int = parameter.placements[-1].dim  # type: ignore[attr-defined]
    return dimension


def _orthogonalised(batch: list[nn.Parameter], parts: list[torch.Tensor], steps: int) -> list[torch.Tensor]:
    """This rank's parts of the matrices' Newton-Schulz results."""
    if not _is_split(batch[0]):
        _newton_schulz(parts[0], steps)
        return parts
    mesh = batch[0].device_mesh  # type: ignore[attr-defined]
    last, ranks = mesh.ndim - 1, mesh.shape[-1]
    group, this = mesh.get_group(last), mesh.get_local_rank(last)
    own, given = torch.cat([part.flatten() for part in parts]), _padded(parts, ranks)
    whole = own.new_empty(batch[this].shape if this < len(batch) else (0, 0))
    places = whole.chunk(ranks, _dimension(batch[this])) if len(whole) else ()
    taken = _padded(places, ranks)
    gathered = own.new_empty(whole.numel())
    dist.all_to_all_single(gathered, own, taken, given, group=group)
    for place, piece in zip(places, gathered.split([p.numel() for p in places]), strict=True):
        place.copy_(piece.view(place.shape))
    _newton_schulz(whole, steps)
    if places:
        torch.cat([place.flatten() for place in places], out=gathered)
    dist.all_to_all_single(own, gathered, given, taken, group=group)
    pieces = own.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _padded(parts: Any, ranks: int) -> list[int]:
    """Sizes for each rank: there may be fewer matrices than ranks, or fewer rows."""
    return [part.numel() for part in parts] + [0] * (ranks - len(parts))


def _newton_schulz(x: torch.Tensor, steps: int) -> None:
    """torch's iteration in place, over one matrix or each of a stack."""
    for matrix in x.unbind() if x.ndim == 3 else ([x] if len(x) else []):
        matrix.copy_(_zeropower_via_newtonschulz(matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), steps, EPS))
