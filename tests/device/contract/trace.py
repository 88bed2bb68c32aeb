"""Which operators runs execute on the simulated device: `python -m contract.trace TINY ROWS OUTPUT REGISTRY`.

All jobs on one rank, or the one that is named behind. REGISTRY says how the real device resolves each
operator: one that is composed of others there counts as these.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hand_made_step import FLAT, take_step
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contract.jobs import all_jobs
from isotrain.recipe.online import OnlineSection
from isotrain.recipe.schema import Recipe
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.hf import HfEngine
from isotrain.trainers.launch import launch

# In the order in which a device without a kernel of its own takes them.
COMPOSITE = {
    "default backend kernel": ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd"),
    "math kernel": ("CompositeImplicitAutograd",),
}


@dataclass
class Trace:
    """Operators on the device, how often each was called, and what needs a closer look."""

    calls: Counter[str] = field(default_factory=Counter)
    double: Counter[str] = field(default_factory=Counter)
    reductions: Counter[str] = field(default_factory=Counter)


class Recorder(TorchDispatchMode):
    def __init__(self, registry: dict[str, str]) -> None:
        super().__init__()
        self.registry = registry
        self.trace = Trace()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:  # sharding asks for shapes
            return func(*args, **kwargs)
        if any(t not in (torch.Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented  # a sharded tensor's operators are those on its parts
        given = tree_leaves((args, kwargs))
        run = self._kernel(func) if any(map(_on_device, given)) else None
        if run is not None:
            with self:
                return run(*args, **kwargs)
        result = func(*args, **kwargs)
        if any(map(_on_device, [*given, *tree_leaves(result)])):
            self._note(func.name(), [*given, *tree_leaves(result)])
        return result

    def _kernel(self, func: Any) -> Callable[..., Any] | None:
        """What the real device runs for an operator that it only has as a composition of others.

        A view computes nothing: it is noted as it is. FSDP's operators are Python, for all devices.
        """
        if func.is_view:
            return None
        written = ("PrivateUse1",) if func.namespace == "fsdp" else ()
        for key in written or COMPOSITE.get(self.registry.get(func.name(), ""), ()):
            if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
                self.trace.calls[func.name()] += 1
                chosen = getattr(torch._C.DispatchKey, key)
                return lambda *args, **kwargs: func._op_dk(chosen, *args, **kwargs)
        return None

    def _note(self, name: str, values: list[Any]) -> None:
        self.trace.calls[name] += 1
        if any(isinstance(v, torch.Tensor) and v.dtype == torch.float64 and _on_device(v) for v in values):
            self.trace.double[name] += 1


def _on_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "npu"
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


@contextmanager
def _reductions(noted: Counter[str]) -> Iterator[None]:
    """Notes which reductions are asked for on the device: the operators below carry them out of sight."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "all_reduce",
            "reduce",
            "reduce_scatter",
            "reduce_scatter_tensor",
            "reduce_scatter_single",
        ):
            original = getattr(dist, name)

            @wraps(original)
            def told(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                given = inspect.signature(_original).bind(*args, **kwargs)
                given.apply_defaults()
                if any(map(_on_device, tree_leaves(given.arguments))):
                    noted[str(given.arguments["op"]).rpartition(".")[2]] += 1
                return _original(*args, **kwargs)

            patch.setattr(dist, name, told)
        yield


def run(recipe: Recipe) -> None:
    """A supervised run as a user starts it, or one step of an online run on trajectories made by hand."""
    if not isinstance(recipe.algorithm, OnlineSection):
        launch(recipe, "")
        return
    take_step(recipe)
    engine = HfEngine(
        Path(recipe.model.path), name="trace", dtype=recipe.model.dtype, device=torch.device("npu:0")
    )
    prompts = [Request(row, row, 0, row, t.tokens_T[: t.prompt_length]) for row, t in enumerate(FLAT[::4])]
    answers = list(engine.generate(prompts, Sampling(max_tokens=4)))
    engine.logps([answer.tokens_T for answer in answers])


def main(tiny: Path, rows: Path, output: Path, registry: Path, only: str = "") -> None:
    known, traces = json.loads(registry.read_text()), {}
    torch.autograd.set_multithreading_enabled(False)  # a mode is of one thread
    for name, recipe in all_jobs(tiny, rows, output).items():
        if only in ("", name):
            with Recorder(known) as recorder, _reductions(recorder.trace.reductions):
                run(recipe)
            traces[name] = vars(recorder.trace)
    (output / f"rank-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(traces))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]), *sys.argv[5:])
