"""A mixture's experts over a device's grouped matrix product, and the loss that balances its routers.

T: tokens, K: experts that each of them chose, R = T * K: rows, D: hidden size, E: experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from isotrain.errors import ModelError
from isotrain.models.config import chosen_experts, number_of_experts, text_config

GROUPED = "isotrain_grouped"

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def provide_experts(multiply: Multiply) -> None:
    """Make the device's operator known to transformers under the name `GROUPED`."""
    ALL_EXPERTS_FUNCTIONS.register(GROUPED, partial(grouped_experts, multiply))


def use_grouped(model: PreTrainedModel) -> None:
    """Have a model's experts, if it has any, compute over it.

    Set in the configuration that its layers look at: when a model is made, not all versions of transformers
    take a name that they do not know.
    """
    for layer in model.modules():
        if hasattr(layer, "is_transposed"):
            layer.config._experts_implementation = GROUPED  # type: ignore[union-attr]


def uses_grouped(model: PreTrainedModel) -> bool:
    """Whether a model has experts whose implementation can be chosen, and this one is."""
    chosen = getattr(text_config(model), "_experts_implementation", None) == GROUPED
    return chosen and any(hasattr(layer, "is_transposed") for layer in model.modules())


def rows_by_expert(chosen_TK: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The expert and the old place of each row in order of experts, and how many rows each expert has."""
    sorted_R, order_R = torch.sort(chosen_TK.flatten(), stable=True)
    # Where each expert's rows begin: no number of it is read by the host, which would wait for the device.
    places = torch.arange(experts + 1, device=sorted_R.device)
    return sorted_R, order_R, torch.searchsorted(sorted_R, places).diff()


def grouped_experts(
    multiply: Multiply,
    experts: Any,
    hidden_TD: torch.Tensor,
    chosen_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """The forward of a layer of experts, in transformers' signature.

    With expert parallelism, transformers has brought each row to its expert: all are chosen among those here.
    """
    sorted_R, order_R, counts_E = rows_by_expert(chosen_TK, experts.num_experts)

    def linear(rows_R: torch.Tensor, name: str) -> torch.Tensor:
        weights_E = getattr(experts, name)
        weights_EMN = weights_E if experts.is_transposed else weights_E.transpose(1, 2)
        # Autocast does not know the operator: what it would cast comes here as it is.
        out_R = multiply(rows_R.to(weights_E.dtype), weights_EMN, counts_E)
        return out_R + getattr(experts, f"{name}_bias")[sorted_R] if experts.has_bias else out_R

    rows_RD = hidden_TD[order_R // chosen_TK.shape[1]]
    if experts.has_gate:
        inner_R = experts._apply_gate(linear(rows_RD, "gate_up_proj"))
    else:
        inner_R = experts.act_fn(linear(rows_RD, "up_proj"))
    out_RD = linear(inner_R, "down_proj")
    out_TKD: torch.Tensor = out_RD[torch.argsort(order_R)].unflatten(0, chosen_TK.shape)
    return (out_TKD * weights_TK[..., None]).sum(1).to(hidden_TD.dtype)


TINY = torch.finfo(torch.float32).tiny


class RouterBalance:
    def __init__(self, model: PreTrainedModel, coefficient: float) -> None:
        kind = model.config.model_type
        # Each family has its own in the file of its model; those that balance in another way have none.
        function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
        if function is None:
            raise ModelError(
                f"model.router_aux_loss: transformers has no such loss for model type '{kind}'; remove it"
            )
        self._function: Callable[..., torch.Tensor] = function
        self.coefficient = coefficient
        self._experts = number_of_experts(model.config)
        self._top_k = chosen_experts(model.config)
        self._are_probabilities: bool | None = None

    def __call__(
        self, recorded: tuple[torch.Tensor, ...], real_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Without the coefficient, over all layers; `real_T` is false at padding."""
        return self._function(self._logits(recorded), self._experts, self._top_k, real_T)

    def _logits(self, recorded: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Some versions of transformers record probabilities under the name of logits, and soften them twice.

        Their logarithms are logits of the same probabilities.
        """
        if self._are_probabilities is None:  # asked once: the answer waits for the device
            sums_T = recorded[0].detach().float().sum(-1)
            self._are_probabilities = bool(((sums_T - 1).abs() < 1e-2).all())
        if not self._are_probabilities:
            return recorded
        return tuple(layer_TE.float().clamp_min(TINY).log() for layer_TE in recorded)
