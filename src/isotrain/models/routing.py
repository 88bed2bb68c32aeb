"""The routers of a mixture of experts: how many they choose, and the loss that balances them.

T: tokens, E: experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from transformers import PretrainedConfig, PreTrainedModel

from isotrain.errors import ModelError

TINY = torch.finfo(torch.float32).tiny


def active_experts(config: PretrainedConfig) -> float:
    """The share of a layer's experts that a token is sent to; 1 for dense models."""
    experts = number_of_experts(config)
    return config.num_experts_per_tok / experts if experts else 1.0


def number_of_experts(config: PretrainedConfig) -> int:
    """Of one layer; families name it differently."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((count for name in names if (count := getattr(config, name, None))), 0)


class RouterBalance:
    def __init__(self, model: PreTrainedModel, coefficient: float) -> None:
        kind, config = model.config.model_type, model.config
        # Each family has its own in the file of its model; those that balance in another way have none.
        function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
        if function is None:
            raise ModelError(
                f"model.router_aux_loss: transformers has no such loss for model type '{kind}'; remove it"
            )
        self._function: Callable[..., torch.Tensor] = function
        self.coefficient = coefficient
        self._experts = number_of_experts(config)
        self._top_k: int = config.num_experts_per_tok
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
