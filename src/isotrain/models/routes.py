"""Routes of a mixture: which experts each token goes to, recorded from routers and forced on them.

T: tokens, R: tokens as the routers see them, L: layers with experts, K: experts of a token, E: all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from isotrain.errors import ModelError
from isotrain.models.config import number_of_experts

FREE = -1
"""In place of experts: the router chooses for itself, such as after a token that no engine has read."""

_TOPK = (torch.topk, torch.Tensor.topk)


def mixtures(pretrained: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers of experts by name, each with the module that has its router too."""
    for name, module in pretrained.named_modules():
        if hasattr(module, "is_transposed"):
            yield name, pretrained.get_submodule(name.rpartition(".")[0])


def ranks_experts(scores: torch.Tensor, experts: int) -> bool:
    """Whether a `topk` of these is a router's last: of groups of experts, there may be others before."""
    return scores.shape[1:] == (experts,)


def taken(
    scores_RE: torch.Tensor, own_RK: torch.Tensor, forced_RK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a router's `topk` gives for given experts, as if they had been the best."""
    chosen_RK = torch.where(forced_RK[:, :1] == FREE, own_RK, forced_RK)
    return scores_RE.gather(-1, chosen_RK), chosen_RK


class RouteReplay:
    """Records the routes of a model's forward passes, or forces given ones on them.

    Whatever a router computes, it ends with the `topk` of one score for each expert. Weights of forced
    experts are computed, and have gradients, as if they had been the best. Layers that run again in a
    backward pass take the routes of the last forward pass.
    """

    def __init__(self, pretrained: PreTrainedModel) -> None:
        self._blocks = [block for _, block in mixtures(pretrained)]
        if not self._blocks:
            raise ModelError(
                f"algorithm.router_replay: model type '{pretrained.config.model_type}' has no experts that "
                "tokens are sent to; remove it"
            )
        self._experts = number_of_experts(pretrained.config)
        self._forced: list[torch.Tensor] | None = None
        self._recorded: dict[int, torch.Tensor] | None = None
        self._modes: list[_InsideRouter] = []
        for layer, block in enumerate(self._blocks):
            block.register_forward_pre_hook(partial(self._enter, layer))
            block.register_forward_hook(self._leave, always_call=True)

    @property
    def layers(self) -> int:
        return len(self._blocks)

    def force(self, chosen_RLK: torch.Tensor | None) -> None:
        """From now on, until it is called again; None leaves the choice to the routers.

        The host does not wait for a device that has them: `check` is for routes that it still has itself.
        """
        if chosen_RLK is not None and chosen_RLK.shape[1] != self.layers:
            raise ModelError(
                f"the recorded routes are of {chosen_RLK.shape[1]} layers with experts, this model has "
                f"{self.layers}: are they of this recipe?"
            )
        self._forced = None if chosen_RLK is None else list(chosen_RLK.long().unbind(1))

    def check(self, chosen_TLK: torch.Tensor) -> None:
        """An error for experts that this model does not have."""
        largest = int(chosen_TLK.max())
        if largest >= self._experts:
            raise ModelError(
                f"the recorded routes name expert {largest}, this model has {self._experts}: are they of "
                "this recipe?"
            )

    def record(self) -> None:
        """Keep the routes of the next forward pass."""
        self._recorded = {}

    def recorded(self) -> torch.Tensor:
        """`chosen_RLK` of the pass since `record`."""
        recorded, self._recorded = self._recorded, None
        assert recorded is not None and len(recorded) == self.layers, "not every layer has routed"
        return torch.stack([recorded[layer] for layer in range(self.layers)], dim=1)

    def _enter(self, layer: int, *_: Any) -> None:
        if self._forced is None and self._recorded is None:
            self._modes.append(_InsideRouter(None, self._experts))
            return
        mode = _InsideRouter(partial(self._route, layer), self._experts)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._modes.append(mode)

    def _leave(self, *_: Any) -> None:
        mode = self._modes.pop()
        if mode.route is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _route(self, layer: int, scores_RE: torch.Tensor, result: Any) -> Any:
        if self._recorded is not None:
            self._recorded[layer] = result[1].detach()
        if self._forced is None:
            return result
        forced_RK = self._forced[layer]
        if forced_RK.shape != result[1].shape:
            raise ModelError(
                f"the recorded routes have {forced_RK.shape[1]} experts for each of {len(forced_RK)} tokens, "
                f"this model {result[1].shape[1]} for {len(result[1])}: are they of this recipe?"
            )
        return torch.return_types.topk(taken(scores_RE, result[1], forced_RK))


class _InsideRouter(TorchFunctionMode):
    """Sees the calls of a layer with experts; `route` changes the result of the router's last `topk`."""

    def __init__(self, route: Callable[[torch.Tensor, Any], Any] | None, experts: int) -> None:
        super().__init__()
        self.route, self._experts = route, experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK or self.route is None:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        return self.route(scores, result) if ranks_experts(scores, self._experts) else result
