"""The loss that balances the routers of a mixture of experts.

T: tokens, E: experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from isotrain.errors import ModelError
from isotrain.models.config import chosen_experts, number_of_experts

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
