"""Hooks on the modules of a model that note what they were given and gave. Rows are tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from isotrain.tools.mismatch.passes import Inside


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The hidden states that a module is called with."""
    values = [kwargs["hidden_states"]] if "hidden_states" in kwargs else [*args, *kwargs.values()]
    return next((v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()), None)


def output_tensor(output: Any) -> torch.Tensor | None:
    first = output[0] if isinstance(output, tuple) else output
    return first if isinstance(first, torch.Tensor) else None


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host with one row for each token."""
    return tensor.detach().reshape(-1, tensor.shape[-1]).to("cpu", copy=True)


@contextmanager
def looking(model: nn.Module, names: Iterable[str], inside: Inside) -> Iterator[None]:
    """Note the modules of these names while the model runs; a name ending in `.gate` is a router."""
    modules = dict(model.named_modules())

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given, result = first_tensor(args, kwargs), output_tensor(output)
            if given is None or result is None:
                return
            if name.endswith(".gate"):
                inside.routers[name.removesuffix(".gate")] = rows(result)
            else:
                inside.inputs[name], inside.outputs[name] = rows(given), rows(result)

        return hook

    with ExitStack() as hooks:
        for name in names:
            if name in modules:
                hooks.enter_context(
                    removed_after(modules[name].register_forward_hook(note(name), with_kwargs=True))
                )
        yield


@contextmanager
def removed_after(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
