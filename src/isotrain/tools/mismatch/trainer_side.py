"""The trainer's part of a diagnosis: hidden states of the same tokens, with changes towards the engine.

Its forward pass is that of training: packed samples, attention and types as the recipe has them.

T: tokens of all sequences, N: response tokens of one, C: conventions, D: hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from isotrain.data.items import Sample
from isotrain.data.packing import pack
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_alone
from isotrain.models.config import chosen_experts
from isotrain.models.conversion import conversions, stored_buffers
from isotrain.tools.mismatch.job import Job
from isotrain.tools.mismatch.passes import Inside, Sequence_, looking
from isotrain.tools.probes.routes import ROUTE, ForcedRoutes

# A module computes something else if its relative error is above so many times that of the trainer's own
# module in the same type, and above what another kernel of that type may have.
LARGEST_RATIO = 8.0
FLOOR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


class Trainer:
    """The model in one type, with changes that make it more like the engine."""

    def __init__(self, job: Job, dtype: str) -> None:
        section = job.model.model_copy(update={"dtype": dtype})
        self.model = build_alone(section, device=choose_device(job.device))
        self.pretrained: Any = self.model.model.pretrained

    @contextmanager
    def with_weights(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Compute with the engine's tensors where they differ."""
        own = dict(self.pretrained.named_parameters(remove_duplicate=False)) | stored_buffers(self.pretrained)
        plain = {
            name: conversion.target
            for conversion in conversions(self.pretrained, own, tensors)
            if conversion.converter is None
            for names in conversion.sources.values()
            for name in names
        }
        changed = {own[t]: tensors[n] for n, t in plain.items() if t in own}
        kept = {parameter: parameter.detach().clone() for parameter in changed}

        def put(values: Mapping[torch.Tensor, torch.Tensor]) -> None:
            with torch.no_grad():
                for parameter, value in values.items():
                    parameter.copy_(value)

        put(changed)
        try:
            yield
        finally:
            put(kept)

    @contextmanager
    def with_routes(self, inside: Inside) -> Iterator[None]:
        """Send tokens to the experts that the engine's routers chose."""
        chosen = chosen_experts(self.pretrained.config)
        with TemporaryDirectory() as directory, ExitStack() as hooks:
            path = Path(directory) / "routes.safetensors"
            routes = {
                f"{ROUTE}{block}.experts": logits.float().topk(chosen).indices.int().contiguous()
                for block, logits in inside.routers.items()
            }
            save_file(routes, path)
            forced = ForcedRoutes(self.pretrained, path)
            for handle in forced.hooks({name: name for name, _ in self.pretrained.named_modules()}):
                hooks.enter_context(handle)
            with forced:
                yield

    @contextmanager
    def with_outputs(self, inside: Inside, names: Iterable[str]) -> Iterator[None]:
        """Replace the outputs of modules by those of the engine."""

        def giving(rows: torch.Tensor) -> Callable[..., Any]:
            def hook(_: Any, __: Any, output: Any) -> Any:
                first, *rest = output if isinstance(output, tuple) else (output,)
                replaced = rows.to(first).reshape(first.shape)
                return (replaced, *rest) if isinstance(output, tuple) else replaced

            return hook

        with ExitStack() as hooks:
            for name in names:
                module = self.pretrained.get_submodule(name)
                hooks.enter_context(module.register_forward_hook(giving(inside.outputs[name])))
            yield

    def hidden(self, sequences: Sequence[Sequence_]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The hidden states that predict each response token, by sequence, and the head's weight."""

        def states(head: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return head.hidden_ND.cpu(), head.weight_VD.detach().cpu()

        samples = [Sample(s.tokens_T, np.arange(len(s.tokens_T)) >= s.prompt_length) for s in sequences]
        hidden_TD, weight_VD = self.model.infer([pack(samples)], states)[0]
        return list(hidden_TD.split([len(s.response_N) for s in sequences])), weight_VD

    def given_inputs(self, sequences: Sequence[Sequence_], inside: Inside) -> Inside:
        """Its modules when each is given the engine's input, and tokens go to the engine's experts."""

        def taking(rows: torch.Tensor) -> Callable[..., Any]:
            def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                if "hidden_states" in kwargs:
                    old = kwargs["hidden_states"]
                    return args, {**kwargs, "hidden_states": rows.to(old).reshape(old.shape)}
                return (rows.to(args[0]).reshape(args[0].shape), *args[1:]), kwargs

            return hook

        with ExitStack() as stack:
            for name, given in inside.inputs.items():
                module = self.pretrained.get_submodule(name)
                stack.enter_context(module.register_forward_pre_hook(taking(given), with_kwargs=True))
            if inside.routers:
                stack.enter_context(self.with_routes(inside))
            names = [*inside.inputs, *(f"{name}.gate" for name in inside.routers)]
            results = stack.enter_context(looking(self.pretrained, names))
            self.hidden(sequences)
        return results


def wrong_modules(
    engine: Mapping[str, torch.Tensor],
    same_type: Mapping[str, torch.Tensor],
    float32: Mapping[str, torch.Tensor],
    dtype: str,
) -> dict[str, float]:
    """Modules whose outputs are further from float32 than their type explains: relative errors by name."""
    wrong = {}
    for name in engine.keys() & same_type.keys() & float32.keys():
        truth = float32[name]
        size = truth.double().square().mean().sqrt().item() or 1.0
        own, reference = (
            (table[name].double() - truth.double()).square().mean().sqrt().item() / size
            for table in (engine, same_type)
        )
        if not own <= LARGEST_RATIO * max(reference, FLOOR[dtype]):
            wrong[name] = own
    return wrong
