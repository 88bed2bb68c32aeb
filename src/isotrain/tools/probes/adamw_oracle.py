"""AdamW's update again, in float64 from a side's own gradient and moments, for a sample of each parameter.

S: sampled elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from isotrain.models.weights import shard_of
from isotrain.tools.probes.operator_errors import signed_share

SAMPLED = 1 << 16
"""Elements of a parameter at most: the copies that wait for the update stay small."""
# Float32 kernels round a quotient, a root and products of an update; the new weight is rounded once.
_UPDATE_DIGITS = 4.0


class UpdateSample:
    """Some elements of a parameter before an update, and what AdamW makes of them."""

    def __init__(self, parameter: nn.Parameter, state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        self._stride = max(1, -(-shard_of(parameter.detach()).local.numel() // SAMPLED))
        before_S, gradient_S = self._sample(parameter.detach()), self._sample(parameter.grad)
        first_S, second_S = (
            self._sample(state[name]) if name in state else torch.zeros_like(before_S)
            for name in ("exp_avg", "exp_avg_sq")
        )
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        updates = float(state.get("step", 0)) + 1
        first_S = beta1 * first_S + (1 - beta1) * gradient_S
        second_S = beta2 * second_S + (1 - beta2) * gradient_S.square()
        root_S = (second_S / (1 - beta2**updates)).sqrt() + group["eps"]
        step_S = first_S / (1 - beta1**updates) / root_S
        after_S = before_S - lr * (step_S + group["weight_decay"] * before_S)
        self._before_S = before_S
        # Rounded as weights are: alike weights with alike first updates are all rounded in one direction.
        self._update_S = after_S.to(parameter.dtype).double() - before_S

    def errors(self, parameter: nn.Parameter) -> tuple[float, float, float]:
        """The parameter's rms error after the update, in roundings, and the gain with its standard error."""
        after_S = self._sample(parameter.detach())
        error_S = after_S - self._before_S - self._update_S
        digit = torch.finfo(parameter.dtype).eps
        unit = digit * float(torch.hypot(after_S / 4, _UPDATE_DIGITS * self._update_S).norm())
        gain = signed_share(error_S * self._update_S, self._update_S.square())
        off = float(error_S.norm())
        return off / unit if unit else (math.inf if off else 0.0), gain.value, gain.error

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        return shard_of(tensor).local.reshape(-1)[:: self._stride].cpu().double()
