"""Routes of a mixture: which experts each token goes to, as recorded, and as forced on a truth.

T: tokens of an update, K: experts of one token, E: all experts of a layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from isotrain.errors import DataError
from isotrain.models.config import stated_constants
from isotrain.models.routes import mixtures, ranks_experts, taken

ROUTE, SCORE = "route/", "score/"
"""Prefixes of tensors in a layer trace; the rest of their names is the layer of experts."""
FORCED = "routes.safetensors"
"""In the directory of a truth: the layer trace whose routes it takes."""

Indices = npt.NDArray[np.int32]
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def chosen_experts(module: nn.Module, arguments: tuple[Any, ...]) -> Indices | None:
    """What a layer of experts was called with, in transformers' signature; None of any other module."""
    if not hasattr(module, "is_transposed") or len(arguments) < 2 or arguments[1].is_floating_point():
        return None
    return np.asarray(arguments[1].detach().cpu(), dtype=np.int32)


class ForcedRoutes(TorchDispatchMode):
    """Has routers take given experts instead of those with the best scores, which it records.

    Whatever a router computes, it ends with the `topk` of one score for each expert. Weights of the given
    experts are computed, and have gradients, as if they had been the best.
    """

    def __init__(self, pretrained: nn.Module, recorded: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mixtures = {
            name: (block, int(pretrained.get_submodule(name).num_experts))  # type: ignore[arg-type]
            for name, block in mixtures(pretrained)
        }
        self._routes = _read(recorded) if recorded.is_file() else {}
        self._begin = self._rows = 0
        self._layer: str | None = None
        self._first_pass = True
        self._logits: torch.Tensor | None = None
        self.scores: dict[str, list[npt.NDArray[np.float64]]] = {}
        """Of each layer's experts: log-probabilities or scores, over the root mean square of the logits."""

    def hooks(self, names: dict[str, str]) -> Iterator[Any]:
        """Routers run inside the module that has the experts; `names` are those of the trace."""
        for experts, (block, count) in self._mixtures.items():
            enter = partial(self._enter, names[experts], count)
            yield block.register_forward_pre_hook(enter)
            yield block.register_forward_hook(self._leave, always_call=True)

    def next_micro_batch(self) -> None:
        self._begin += self._rows
        self._rows, self._first_pass = 0, True

    def end_forward(self) -> None:
        """Layers that run again in the backward pass have been recorded."""
        self._first_pass = False

    def _enter(self, name: str, count: int, *_: Any) -> None:
        self._layer, self._experts, self._logits = name, count, None

    def _leave(self, *_: Any) -> None:
        self._layer = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._layer is None:
            return result
        if func in _PRODUCTS and result.shape[-1] == self._experts:
            self._logits = result
        if func is not torch.ops.aten.topk.default or not ranks_experts(args[0], self._experts):
            return result
        scores_TE = args[0]
        self._rows = len(scores_TE)
        if self._first_pass:
            self.scores.setdefault(self._layer, []).append(_in_logits(scores_TE, self._logits))
        if self._layer not in self._routes:
            return result
        forced_TK = self._routes[self._layer][self._begin : self._begin + self._rows]
        if forced_TK.shape != result[1].shape or forced_TK.max(initial=0) >= self._experts:
            raise DataError(
                f"{self._layer}: the recorded routes have {forced_TK.shape[1]} experts for each of "
                f"{len(forced_TK)} tokens, this model {result[1].shape[1]} for {self._rows}: are they of "
                "this recipe?"
            )
        chosen_TK = torch.from_numpy(forced_TK.astype(np.int64)).to(scores_TE.device)
        return taken(scores_TE, result[1], chosen_TK)


def _in_logits(scores_TE: torch.Tensor, logits_TE: torch.Tensor | None) -> npt.NDArray[np.float64]:
    """Probabilities have gaps by their logarithms, which are those of the logits or less."""
    wide_TE = scores_TE.detach().double()
    if bool(((wide_TE >= 0) & (wide_TE <= 1)).all()):
        wide_TE = wide_TE.log()
    size = float((wide_TE if logits_TE is None else logits_TE).detach().square().mean().sqrt())
    scores: npt.NDArray[np.float64] = (wide_TE / (size or 1.0)).cpu().numpy()
    return scores


def _read(recorded: Path) -> dict[str, Indices]:
    with safe_open(recorded, "np") as file:
        names = [name for name in file.keys() if name.startswith(ROUTE)]  # noqa: SIM118
        return {name.removeprefix(ROUTE): file.get_tensor(name) for name in names}


def model_digest(pretrained: Any) -> str:
    """Of weights and constants: truths with other routes must be those of one model."""
    digest = hashlib.sha256(stated_constants(pretrained.config).encode())
    for name, parameter in pretrained.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
