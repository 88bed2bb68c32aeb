"""Records a few updates of a run, layer by layer, for `isotrain parity`.

T: packed tokens, N: loss-bearing tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save
from torch import nn
from torch.utils.hooks import RemovableHandle

from isotrain.engine.engine import TrainingEngine
from isotrain.errors import RecipeError
from isotrain.models.lora import ADAPTER
from isotrain.models.weights import shard_of
from isotrain.observe.run_directory import write_atomically
from isotrain.tools.probes.adamw_oracle import UpdateSample
from isotrain.tools.probes.routes import ROUTE, Indices, chosen_experts

KINDS = ("activation", "gradient", "parameter gradient", "update")
DIGESTS = ("tokens", "packing", "loss")

_WRAPPER = re.compile(rf"\.(?:base_layer|_checkpoint_wrapped_module)\b|(\.lora_\w+)\.{ADAPTER}\b")


class _Update:
    """The record of one update so far; entries are in order of first appearance."""

    def __init__(self) -> None:
        self.sketches: dict[str, dict[str, Sketch]] = {kind: {} for kind in KINDS}
        self.weight_norms: list[float] = []
        """Of the trained parameters as the update found them."""
        self.recomputed: list[tuple[float, float, float]] = []
        """Of the trained parameters: how far the update is from AdamW's of their gradient, in float64."""
        self.routes: dict[str, list[Indices]] = {}
        """The experts of each token, by layer of experts, in each micro-batch."""
        self.digests = {name: hashlib.sha256() for name in DIGESTS}
        self.micro_batches = 0
        self.loss = 0.0

    def add(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        self.sketches[kind].setdefault(name, Sketch()).add(tensor)

    def digest(self, name: str, numbers: Any) -> None:
        flat = np.asarray(numbers, dtype="<i8").reshape(-1)
        # With its length, so that numbers cannot move from one micro-batch to the next unseen.
        self.digests[name].update(len(flat).to_bytes(8, "little") + flat.tobytes())


class LayerTrace:
    """Records through hooks; training stays bitwise identical, only slower.

    Of every tensor a sketch is kept: outputs of layers and their gradients, the parameters' gradients after
    clipping, and how the update changed each parameter. While an update is recorded, the host holds a copy of
    this rank's trained weights. After `steps` updates, all hooks are removed.
    """

    def __init__(self, directory: Path, steps: int, *, after: int = 0) -> None:
        """`after` is how many steps the run has taken before."""
        self._after = after
        self._directory = directory
        self._steps = steps
        self._done = 0
        self._looking = False
        self._before: dict[str, torch.Tensor] = {}
        self._samples: dict[str, UpdateSample] = {}
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def around_update(self, engine: TrainingEngine) -> Iterator[None]:
        if self._done == self._steps:
            yield
            return
        if not self._handles:
            self._attach(engine)
        # An update that is not finite makes no optimizer step, and leaves no record.
        self._update = _Update()
        yield
        if self._done == self._steps:
            for handle in self._handles:
                handle.remove()

    def _attach(self, engine: TrainingEngine) -> None:
        self._engine, model, optimizer = engine, engine.model, engine.optimizer
        self._handles += [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave),
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        for name, module in model.pretrained.named_modules():
            # What an adapter wraps has the same name as the layer that it is part of.
            if name and not name.endswith(".base_layer"):
                hook = partial(self._layer, plain_name(name))
                self._handles.append(module.register_forward_hook(hook))

    def _enter(self, model: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._looking = model.training and torch.is_grad_enabled()
        if not self._looking:
            return
        self._update.micro_batches += 1
        tokens_T, positions_T, lengths, predict_N, targets_N, _, *rest = arguments
        self._update.digest("tokens", tokens_T.cpu())
        for numbers in (positions_T.cpu(), lengths, *rest):
            self._update.digest("packing", numbers)
        for numbers in (predict_N.cpu(), targets_N.cpu()):
            self._update.digest("loss", numbers)

    def _leave(self, _: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if self._looking and (loss := _first_tensor(output)) is not None:
            self._update.loss += float(loss.detach().cpu().double())
        # Layers that run again in the backward pass are those of gradient checkpointing.
        self._looking = False

    def _layer(self, name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        tensor = _first_tensor(output)
        if not self._looking or tensor is None:
            return
        # Gemma calls one rotary embedding for each kind of layer, in the order of a set of their names, which
        # is another in each process.
        kinds = [argument for argument in arguments if isinstance(argument, str)]
        name = f"{name}[{', '.join(kinds)}]" if kinds else name
        if (chosen_TK := chosen_experts(module, arguments)) is not None:
            self._update.routes.setdefault(name, []).append(chosen_TK)
        self._update.add("activation", name, tensor)
        if tensor.requires_grad:
            tensor.register_hook(partial(self._update.add, "gradient", name))

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in self._trained().items():
            if parameter.grad is not None:
                self._update.add("parameter gradient", name, shard_of(parameter.grad).local)
                state, group = optimizer.state.get(parameter, {}), groups[id(parameter)]
                if "betas" in group:  # others are not AdamW's
                    self._samples[name] = UpdateSample(parameter, state, group)
            self._before[name] = _on_host(parameter)

    def _after_step(self, *_: Any) -> None:
        for name, parameter in self._trained().items():
            before = self._before.pop(name)
            self._update.add("update", name, _on_host(parameter) - before)
            sample = self._samples.pop(name, None)
            self._update.recomputed.append((0.0, 0.0, 0.0) if sample is None else sample.errors(parameter))
            self._update.weight_norms.append(float(torch.linalg.vector_norm(before, dtype=torch.float64)))
        self._done += 1
        self._write()

    def _trained(self) -> dict[str, nn.Parameter]:
        prefix = self._engine.model.prefix
        return {plain_name(name.removeprefix(prefix)): p for name, p in self._engine.trained.items()}

    def _write(self) -> None:
        update = self._update
        tensors = {"loss": np.array([update.loss]), "weight/norm": np.array(update.weight_norms)}
        tensors["update/recomputed"] = np.array(update.recomputed, dtype=np.float64).reshape(-1, 3)
        for kind, entries in update.sketches.items():
            sketches = list(entries.values())
            if kind == "gradient" and self._engine.loss_scale is not None:
                for sketch in sketches:
                    sketch.divide(self._engine.loss_scale.value)
            tensors[f"{kind}/sketch"] = np.array([s.numbers_KK for s in sketches]).reshape(
                len(sketches), *Sketch().numbers_KK.shape
            )
            tensors[f"{kind}/norm"] = np.array([s.norm for s in sketches], dtype=np.float64)
            tensors[f"{kind}/shape"] = np.array([(s.rows, s.columns) for s in sketches], np.int64).reshape(
                -1, 2
            )
        for name, routes in update.routes.items():
            tensors[ROUTE + name] = np.concatenate(routes)
        tensors |= self._more_tensors()
        facts: dict[str, Any] = {
            "format": 1,
            "step": self._after + self._done,
            "ranks": self._engine.world.size,
            "micro_batches": update.micro_batches,
            "digests": {n: d.hexdigest() for n, d in update.digests.items()} | self._more_digests(),
            "names": {kind: list(entries) for kind, entries in update.sketches.items()},
        }
        name = f"step-{self._after + self._done:06d}"
        path = self._directory / f"{name}-rank-{self._engine.world.rank:05d}.safetensors"
        write_record(path, save(tensors, {name: json.dumps(fact) for name, fact in facts.items()}))

    def _more_tensors(self) -> dict[str, npt.NDArray[Any]]:
        """What only a truth records."""
        return {}

    def _more_digests(self) -> dict[str, str]:
        return {}


def write_record(path: Path, content: str | bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise RecipeError(
            f"observe.layer_trace: cannot write {path} ({error.strerror or error}): "
            "free disk space, or remove observe.layer_trace"
        ) from error


def plain_name(name: str) -> str:
    """A layer's or parameter's name in the published model, whatever it is wrapped in."""
    return _WRAPPER.sub(r"\1", name)


def _first_tensor(output: Any) -> torch.Tensor | None:
    """A layer's output, or the first of several; None where that is no tensor of real numbers."""
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, torch.Tensor) and first.is_floating_point() else None


def _on_host(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's part, which the next update leaves alone."""
    return shard_of(parameter.detach()).local.to("cpu", copy=True)


SIZE = 32
# Of each part that is widened on the host at one time.
_NUMBERS_AT_ONCE = 1 << 22
_ROWS, _COLUMNS = 0x1D8E4E27C47D124F, 0xEB44ACCAB455D165


class Sketch:
    """A count-sketch of rows and of columns: each is added to one of `SIZE` buckets with a sign of its own.

    Buckets and signs come from the index alone, so sketches of two machines can be subtracted. The norm of
    the difference is that of the matrices' difference within 2 to 3 %, within 20 % where a single row or
    column makes it.
    """

    def __init__(self) -> None:
        self.numbers_KK = np.zeros((SIZE, SIZE))
        self.rows = self.columns = 0
        self._squares = 0.0

    @property
    def norm(self) -> float:
        """Norm of the matrix itself, exact."""
        return math.sqrt(self._squares)

    @torch.no_grad()
    def add(self, tensor: torch.Tensor) -> None:
        """Rows after those that are there already; the last dimension has the columns."""
        columns = tensor.shape[-1] if tensor.ndim else 1
        part_TD = tensor.detach().reshape(-1, columns) if tensor.numel() else tensor.new_empty(0, columns)
        sums_KD = torch.zeros(SIZE, columns, dtype=torch.float64)
        for some_TD in part_TD.split(max(1, _NUMBERS_AT_ONCE // columns)):
            # Widened on the host: not every device has float64.
            wide_TD = some_TD.cpu().double()
            bucket_T, sign_T = _places(self.rows, len(wide_TD), _ROWS)
            spread_KT = torch.zeros(SIZE, len(wide_TD), dtype=torch.float64)
            spread_KT[bucket_T, torch.arange(len(wide_TD))] = sign_T
            sums_KD += spread_KT @ wide_TD
            self._squares += float(wide_TD.square().sum())
            self.rows += len(wide_TD)
        bucket_D, sign_D = _column_places(columns)
        sums_KK = torch.zeros(SIZE, SIZE, dtype=torch.float64).index_add_(1, bucket_D, sums_KD * sign_D)
        self.numbers_KK += sums_KK.numpy()
        self.columns = columns

    def divide(self, by: float) -> None:
        self.numbers_KK /= by
        self._squares /= by * by


@lru_cache(maxsize=16)
def _column_places(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _places(0, count, _COLUMNS)


def _places(start: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bucket and sign of each index."""
    mixed = _mixed(np.arange(start, start + count, dtype=np.uint64) + np.uint64(seed))
    bucket = (mixed >> np.uint64(33)) % np.uint64(SIZE)
    sign = 1.0 - 2.0 * ((mixed >> np.uint64(13)) & np.uint64(1)).astype(np.float64)
    return torch.from_numpy(bucket.astype(np.int64)), torch.from_numpy(sign)


def _mixed(index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64: whole numbers that wrap around, the same on every machine."""
    x = index * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    final: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return final
