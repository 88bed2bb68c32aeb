"""Records what the constants of a run's model are in its first training step, for `isotrain parity`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from isotrain.engine.engine import TrainingEngine
from isotrain.models.attention import is_padded
from isotrain.models.config import text_config
from isotrain.tools.probes.layer_trace import plain_name, write_record
from isotrain.tools.probes.score_tests.families import (
    UnknownError,
    attention_constants,
    head_size,
    norm_constants,
    rope_constants,
)
from isotrain.tools.probes.score_tests.fit import Fit
from isotrain.tools.probes.score_tests.modules import (
    ATTENTION_CONSTANTS,
    NORM_CONSTANTS,
    ROTARY_CONSTANTS,
    Norm,
    check_attention,
    check_norm,
    check_rotary,
)
from isotrain.tools.probes.score_tests.samples import Heads, Segment, on_host, rows, segments

FORMAT, STEP = 1, 1
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# Results of these types are compared; any other is of a kernel that is not known here.
_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class ScoreTestRecorder:
    """Looks on through hooks at the first micro-batch that trains; training stays bitwise identical.

    Each norm, attention and rotary embedding is computed again on the host, in float64 and from its own real
    inputs, with the constants that the model's config states and never those that the module holds.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._looking = False
        self._segments: list[Segment] = []
        self._held: dict[str, dict[str, Any]] = {}
        """Of each attention that runs: what it was given so far."""
        self._modules: list[dict[str, Any]] = []
        self._not_tested: dict[str, str] = {}
        self._handles: list[RemovableHandle] = []

    def around_update(self, engine: TrainingEngine) -> AbstractContextManager[None]:
        if not self._handles:
            self._attach(engine)
        return nullcontext()

    def _attach(self, engine: TrainingEngine) -> None:
        model, self._world = engine.model, engine.world
        self._text = text_config(model.pretrained)
        self._handles += [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave),
        ]
        for full_name, module in model.pretrained.named_modules():
            name, kind = plain_name(full_name), type(module).__name__
            try:
                if kind.endswith("RMSNorm"):
                    norm = partial(self._norm, name, norm_constants(self._text, name))
                    self._handles.append(module.register_forward_hook(norm))
                elif kind.endswith("Attention"):
                    self._attach_attention(name, module)
                elif kind.endswith("RotaryEmbedding"):
                    hook = partial(self._rotary, name)
                    self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
                elif kind.endswith("Norm"):
                    raise UnknownError(f"norms of class {kind} are not known here")
            except UnknownError as reason:
                self._not_tested[name] = str(reason)

    def _attach_attention(self, name: str, module: Any) -> None:
        constants = attention_constants(self._text, int(getattr(module, "layer_idx", 0)))
        normed = ("q_norm", "k_norm") if constants.query_norm else ()
        parts = (*_PROJECTIONS, "o_proj")
        if not all(isinstance(getattr(module, part, None), nn.Module) for part in (*parts, *normed)):
            raise UnknownError(f"attention of class {type(module).__name__} has other parts")
        if not normed and hasattr(module, "q_norm"):
            raise UnknownError("attention that norms its queries, which this model type has not")

        def hold(part: str, _: nn.Module, arguments: Any, output: Any) -> None:
            if self._looking:
                self._held.setdefault(name, {})[part] = output

        for part in (*_PROJECTIONS, *normed):
            self._handles.append(getattr(module, part).register_forward_hook(partial(hold, part)))
        self._handles += [
            module.register_forward_pre_hook(partial(self._angles, name), with_kwargs=True),
            module.o_proj.register_forward_pre_hook(partial(self._attention, name, constants)),
        ]

    def _enter(self, model: Any, arguments: tuple[Any, ...]) -> None:
        self._looking = model.training and torch.is_grad_enabled()
        if self._looking:
            _, _, lengths, _, _, _, *rest = arguments
            continues = rest[0] if rest else ()
            self._segments = segments(lengths, continues, is_padded(model.attention))

    def _leave(self, *_: Any) -> None:
        if self._looking:
            self._looking = False
            for handle in self._handles:
                handle.remove()
            self._write()

    def _norm(self, name: str, constants: Any, module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        if not self._looking:
            return
        x, weight = arguments[0], module.weight

        def test(dtype: str) -> tuple[Fit, float]:
            if isinstance(weight, DTensor):
                raise UnknownError("its weight is sharded while it runs")
            x_RD, y_RD = rows(x, output)
            gain_D = on_host(weight) + constants.adds_one
            return check_norm(Norm(x_RD, gain_D, constants.epsilon), y_RD, dtype)

        self._tell(name, "norm", NORM_CONSTANTS, (constants.epsilon, None, None), output, test)

    def _rotary(self, name: str, _: nn.Module, arguments: Any, options: dict[str, Any], output: Any) -> None:
        if not self._looking:
            return
        given = dict(zip(("x", "position_ids", "layer_type"), arguments, strict=False)) | options
        layer_type = given.get("layer_type")
        shown_name = name if layer_type is None else f"{name} ({layer_type})"
        try:
            rope = rope_constants(self._text, layer_type)
        except UnknownError as reason:
            self._not_tested[shown_name] = str(reason)
            return

        def test(dtype: str) -> tuple[Fit, float]:
            cos, sin = output
            if cos.shape[-1] != rope.head_size:
                raise UnknownError("it turns another part of each head than the config says")
            half = rope.head_size // 2
            positions_P = on_host(given["position_ids"].reshape(-1))
            cos_PF, sin_PF = (on_host(y.reshape(-1, rope.head_size)[:, :half]) for y in (cos, sin))
            return check_rotary(rope, positions_P, cos_PF, sin_PF, dtype)

        self._tell(shown_name, "rotary", ROTARY_CONSTANTS, (rope.base, None), output[0], test)

    def _angles(self, name: str, _: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
        if self._looking:
            given = dict(zip(("hidden_states", "position_embeddings"), arguments, strict=False)) | options
            self._held[name] = {"angles": given.get("position_embeddings")}

    def _attention(self, name: str, constants: Any, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        held = self._held.pop(name, {})
        if not self._looking:
            return
        output = arguments[0]

        def test(dtype: str) -> tuple[Fit, float]:
            heads = self._heads(held, constants, output)
            samples = heads.samples(self._segments)
            if not samples:
                raise UnknownError("no sample has two tokens")
            return check_attention(samples, constants.scale, dtype)

        self._tell(name, "attention", ATTENTION_CONSTANTS, (constants.scale, None, None), output, test)

    def _heads(self, held: dict[str, Any], constants: Any, output: torch.Tensor) -> Heads:
        size = head_size(self._text)

        def split(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(*x.shape[:2], -1, size)

        query, key, value = (split(held[part]) for part in _PROJECTIONS)
        if constants.query_norm:
            query, key = held["q_norm"], held["k_norm"]
        if constants.query_norm == "heads":
            query, key = query.transpose(1, 2), key.transpose(1, 2)
        cos, sin = held["angles"]
        return Heads(query, key, value, cos, sin, split(output), constants.window)

    def _tell(
        self,
        name: str,
        kind: str,
        constants: tuple[str, ...],
        stated: tuple[float | None, ...],
        output: torch.Tensor,
        test: Callable[[str], tuple[Fit, float]],
    ) -> None:
        """Keep what the fit found, or why there is none."""
        if any(module["module"] == name for module in self._modules):
            return  # a module that runs more than once is tested once
        try:
            if output.dtype not in _TYPES:
                raise UnknownError(f"numbers of type {output.dtype}")
            dtype = _TYPES[output.dtype]
            # Without gradients: gradient checkpointing counts what each forward keeps for them.
            with torch.no_grad(), np.errstate(all="ignore"):
                result, rounding = test(dtype)
            if not all(map(math.isfinite, (result.rest, rounding, *(e.off for e in result.estimates)))):
                raise UnknownError("its numbers are not finite")
        except UnknownError as reason:
            self._not_tested[name] = str(reason)
            return
        rounds = result.rest / rounding if rounding else (0.0 if result.rest == 0 else 1e30)
        self._modules.append(
            {
                "module": name,
                "kind": kind,
                "dtype": dtype,
                "clusters": result.clusters,
                "rest": min(rounds, 1e30),
                "constants": [
                    {
                        "constant": constant,
                        "stated": value,
                        "off": estimate.off,
                        "error": estimate.error,
                        "effect": estimate.effect,
                        "confused": [constants[other] for other in estimate.confused],
                    }
                    for constant, value, estimate in zip(constants, stated, result.estimates, strict=True)
                ],
            }
        )

    def _write(self) -> None:
        world = self._world
        content = {
            "format": FORMAT,
            "step": STEP,
            "ranks": world.size,
            "model_type": str(self._text.model_type),
            "modules": self._modules,
            "not_tested": self._not_tested,
        }
        path = self._directory / f"step-{STEP:06d}-rank-{world.rank:05d}.json"
        write_record(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
