"""The truth of a forced step: the same update in float64 on the host, recorded like any other layer trace.

Weights stay in float32. What a layer computes with is widened when the layer begins, and gradient
checkpointing lets go of it when the layer ends: one layer and the head are in float64 at a time.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from isotrain.engine.engine import TrainingEngine
from isotrain.errors import DataError
from isotrain.models.config import attention_shapes
from isotrain.models.load import layers_of
from isotrain.tools.probes.layer_trace import LayerTrace, plain_name
from isotrain.tools.probes.routes import FORCED, SCORE, ForcedRoutes, model_digest

_NARROW = {torch.float32, torch.bfloat16, torch.float16}
_SECONDS_BETWEEN_LINES = 10.0
# Passes of a layer through its matrices: forward, again for the backward pass, and that, which is two.
_PASSES = 4
PROCESS = 500_000_000
"""Bytes of Python with torch and transformers before a model is there."""


class Widening(TorchDispatchMode):
    """Every operator computes in float64, whatever type the model's code casts to.

    Norms, softmax and losses of published models cast to float32 by themselves: a model in float64 is not
    the truth yet.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or self._writes_narrow(func, args, kwargs):
            return func(*args, **kwargs)
        args, kwargs = tree_map(_widened, (tuple(args), kwargs))
        names = [argument.name for argument in func._schema.arguments]
        if "half_to_float" in names:  # of softmax: in float64 there is nothing to widen
            args = tuple(False if n == "half_to_float" else a for n, a in zip(names, args, strict=False))
        return func(*args, **kwargs)

    @staticmethod
    def _writes_narrow(func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the result goes to memory that is narrow already, such as that of the weights."""
        if not func._schema.is_mutable:
            return False
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                target = args[place] if place < len(args) else kwargs.get(argument.name)
                if any(isinstance(t, torch.Tensor) and t.dtype in _NARROW for t in tree_leaves(target)):
                    return True
        return False


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype in _NARROW else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _NARROW else value
    return value


class _WideParameter(torch.autograd.Function):
    """A parameter in float64; its gradient goes to `add`, because a float32 parameter takes no other."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, add: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.add = add
        return parameter.double()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.add(gradient)
        return None, None


class _Gradients:
    """Sums of float64 gradients in files without names, of which memory holds what is in use."""

    def __init__(self, directory: Path, parameters: dict[str, nn.Parameter]) -> None:
        needed = 8 * sum(p.numel() for p in parameters.values())
        free = shutil.disk_usage(directory).free
        if needed > free:
            raise DataError(
                f"{directory}: the gradients in float64 need {needed / 1e9:.1f} GB of disk and "
                f"{free / 1e9:.1f} GB are free; give another directory with --out"
            )
        self._directory, self._sums = directory, dict[str, torch.Tensor]()

    def add(self, name: str, gradient: torch.Tensor) -> None:
        if name in self._sums:
            self._sums[name].add_(gradient)
            return
        with TemporaryDirectory(dir=self._directory) as directory:
            # The mapping keeps the file until the tensor is gone.
            path = str(Path(directory) / "gradient")
            mapped = torch.from_file(path, shared=True, size=gradient.numel(), dtype=torch.float64)
        self._sums[name] = mapped.view(gradient.shape).copy_(gradient)

    def pop(self, name: str) -> torch.Tensor | None:
        return self._sums.pop(name, None)

    def norm(self) -> float:
        return math.sqrt(sum(float(gradient.square().sum()) for gradient in self._sums.values()))


class TruthTrace(LayerTrace):
    """Records the next update in float64; the weights stay as they are, so that no update follows it."""

    def __init__(self, directory: Path, *, after: int = 0, say: Callable[[str], None] | None = None) -> None:
        super().__init__(directory, 1, after=after)
        self._say = say or partial(print, file=sys.stderr, flush=True)

    @contextmanager
    def around_update(self, engine: TrainingEngine) -> Iterator[None]:
        if self._done:
            yield
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        self._gradients = _Gradients(self._directory, engine.trained)
        pretrained = engine.model.pretrained
        self._model = model_digest(pretrained)
        self._forced = ForcedRoutes(pretrained, self._directory.parent / FORCED)
        names = {name: plain_name(name) for name, _ in pretrained.named_modules()}
        progress = _LayerProgress(layers_of(pretrained), self._say)
        with ExitStack() as stack:
            for handle in (*progress.hooks(), *self._forced.hooks(names)):
                stack.callback(handle.remove)
            stack.enter_context(super().around_update(engine))
            stack.enter_context(wide_parameters(engine.model, self._gradients.add))
            stack.enter_context(default_dtype(torch.float64))
            # The backward pass would have threads of its own, which no mode sees.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(Widening())  # type: ignore[no-untyped-call]
            stack.enter_context(self._forced)
            stack.enter_context(_in_place_of(engine, "clip_gradients", self._record_gradients))
            yield
        self._done += 1
        self._write()

    def _enter(self, model: nn.Module, arguments: tuple[Any, ...]) -> None:
        super()._enter(model, arguments)
        self._forced.next_micro_batch()

    def _leave(self, model: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        super()._leave(model, arguments, output)
        self._forced.end_forward()

    def _more_tensors(self) -> dict[str, Any]:
        return {SCORE + name: np.concatenate(scores) for name, scores in self._forced.scores.items()}

    def _more_digests(self) -> dict[str, str]:
        return {"model": self._model}

    def _record_gradients(self) -> float:
        """In place of the engine's own clipping: its parameters have no gradients."""
        norm = self._gradients.norm()
        largest = self._engine.max_grad_norm
        factor = min(1.0, largest / (norm + 1e-6)) if largest > 0 else 1.0
        for name in self._trained():
            if (gradient := self._gradients.pop(name)) is not None:
                self._update.add("parameter gradient", name, gradient * factor)
        return norm

    def _before_step(self, *_: Any) -> None:
        """The parameters have no gradient of their own: the optimizer's step changes nothing."""

    def _after_step(self, *_: Any) -> None:
        """The update is recomputed from a side's own gradient elsewhere: float64 has nothing to add to it."""


@contextmanager
def _in_place_of(owner: Any, name: str, method: Callable[[], float]) -> Iterator[None]:
    setattr(owner, name, method)
    try:
        yield
    finally:
        delattr(owner, name)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def wide_parameters(model: nn.Module, add: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Have modules compute with float64 copies of their parameters; `add` gets their gradients by name.

    A copy hides the parameter of its module while the layer around it runs: some layers read parameters of
    modules that they never call, such as a convolution's. Those of the head are read from outside it, and are
    there all the time.
    """
    prefix = getattr(model, "prefix", "")
    names = {id(p): plain_name(name.removeprefix(prefix)) for name, p in model.named_parameters()}

    def widen(modules: Iterable[nn.Module]) -> None:
        for module in modules:
            for name, p in module._parameters.items():
                if p is not None:
                    module.__dict__[name] = _WideParameter.apply(p, partial(add, names[id(p)]))  # type: ignore[no-untyped-call]

    def narrow(modules: Iterable[nn.Module]) -> None:
        for module in modules:
            for name in module._parameters:
                module.__dict__.pop(name, None)

    pretrained = getattr(model, "pretrained", model)
    always = [head for head in (_head(pretrained),) if head is not None]
    inside = {module: list(module.modules()) for module in layers_of(pretrained)}
    covered = {part for parts in inside.values() for part in parts}
    alone = [module for module in model.modules() if module not in covered and module not in always]
    inside |= {module: [module] for module in alone}
    handles = []
    for module, parts in inside.items():
        handles.append(module.register_forward_pre_hook(lambda *_, parts=parts: widen(parts)))
        handles.append(module.register_forward_hook(lambda *_, parts=parts: narrow(parts), always_call=True))
    widen(always)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        narrow(model.modules())


def _head(pretrained: Any) -> nn.Module | None:
    """The module whose weight makes logits or scores."""
    score = getattr(pretrained, "score", None)
    if isinstance(score, nn.Module):
        return score
    get = getattr(pretrained, "get_output_embeddings", None)
    head = get() if get is not None else None
    return head if isinstance(head, nn.Module) else None


class _LayerProgress:
    """Tells how far the step is, and how long it may take: all layers of a model cost about the same."""

    def __init__(self, layers: list[nn.Module], say: Callable[[str], None]) -> None:
        self._layers, self._say = layers, say
        self._begun = self._told = time.monotonic()
        self._passes = 0
        self._last = float("nan")

    def hooks(self) -> Iterator[Any]:
        for number, layer in enumerate(self._layers, start=1):
            yield layer.register_forward_pre_hook(self._enter)
            yield layer.register_forward_hook(partial(self._leave, number))

    def _enter(self, *_: Any) -> None:
        self._last = time.monotonic()

    def _leave(self, number: int, *_: Any) -> None:
        now = time.monotonic()
        self._passes += 1
        if self._passes == 1:
            seconds = (now - self._last) * _PASSES * len(self._layers)
            self._say(f"truth: {len(self._layers)} layers in float64; about {seconds:.0f} s a micro-batch")
        if now - self._told > _SECONDS_BETWEEN_LINES:
            self._told = now
            direction = "forward" if number == self._passes else "layer"
            self._say(f"truth: {direction} {number} of {len(self._layers)}, {now - self._begun:.0f} s")


@dataclass(frozen=True)
class TruthMemory:
    """Bytes that a truth needs at most, from shapes alone."""

    weights: int
    """Of the whole model, in float32."""
    wide: int
    """Float64 copies: a layer and its gradients, the embedding's and the head's."""
    activations: int
    """Inputs of all layers, one layer's inside, and the logits of a chunk."""
    disk: int
    """Sums of gradients."""

    @property
    def total(self) -> int:
        return PROCESS + self.weights + self.wide + self.activations


def memory_of(pretrained: Any, tokens: int, *, chunk: int | None = None) -> TruthMemory:
    """The plan for a micro-batch of `tokens` tokens; the model may be on the meta device.

    An operator inside a layer keeps its result, and one copy where types or layouts change.
    """
    layers = layers_of(pretrained)
    per_layer = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
    everything = sum(p.numel() for p in pretrained.parameters())
    vocabulary, hidden = pretrained.get_output_embeddings().weight.shape
    # Chunks are cut for float32 logits of a quarter of a gibibyte (engine/build.py).
    logits = min(tokens, chunk or max(1, (256 << 20) // (4 * vocabulary))) * vocabulary
    sides = [max(m.in_features, m.out_features) for m in layers[0].modules() if isinstance(m, nn.Linear)]
    inner = 16 * hidden + 6 * max(sides, default=4 * hidden)
    heads = max(shape.query_heads for shape in attention_shapes(pretrained.config))
    longest = tokens * tokens * heads
    return TruthMemory(
        weights=4 * everything,
        # The head's copy stays, its gradient is summed over chunks, and so is the embedding's made.
        wide=8 * (3 * per_layer + 4 * vocabulary * hidden),
        activations=8 * (tokens * (2 * hidden * len(layers) + 2 * inner) + 2 * longest + 5 * logits),
        disk=8 * everything,
    )
