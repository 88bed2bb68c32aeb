"""A fake device: its tensors have no memory, its collectives move nothing, its attention is a flash kernel's.

S: batch, H: query heads, G: key/value heads, L: queries, K: keys, D: head size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from isotrain.device.base import FusedOperators, Memory, Profiler
from isotrain.engine.world import World, form_mesh
from isotrain.errors import PlanError
from isotrain.recipe.schema import MeshSection
from isotrain.tools.plan.ledger import can_count

TYPE = "fake"


class _Stream:
    """Fake work is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = synchronize = wait_stream

    def record_event(self, *_: Any) -> _Event:
        return _Event()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True


@cache
def _register() -> None:
    """Tell torch of the device, once in a process."""
    from torch.utils import backend_registration

    if not can_count():
        raise PlanError(
            f"torch {torch.__version__} cannot run a step on fake tensors; plan in an environment with "
            "torch 2.13 (its CPU build on any machine is enough)"
        )

    class BackendModule(backend_registration._DummyBackendModule):
        Stream, Event = _Stream, _Event

        def current_stream(self, *_: Any) -> _Stream:
            return _Stream()

        def stream(self, _: Any) -> AbstractContextManager[None]:
            return nullcontext()

        def device_count(self) -> int:
            return 1

        def current_device(self) -> int:
            return 0

        def set_device(self, _: Any) -> None:
            pass

        def synchronize(self, *_: Any) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

        def get_rng_state(self, *_: Any) -> torch.Tensor:
            return torch.get_rng_state()

        def set_rng_state(self, *_: Any) -> None:
            pass

    backend_registration._setup_privateuseone_for_python_backend(TYPE, BackendModule())
    # Devices have kernels for these; without one, torch would take several operators, and memory for each.
    _kernels.impl("silu_backward", lambda grad, _: torch.empty_like(grad))


_kernels = torch.library.Library("aten", "IMPL", "PrivateUse1")


@dataclass(frozen=True)
class FakeDevice:
    """The interface of a device, for code that asks what it may use."""

    experts: str = "grouped_mm"
    type: str = TYPE
    collectives: str = f"cpu:fake,{TYPE}:fake"
    interface_variable: None = None
    visible_devices_variable: None = None
    ray_resource: str = TYPE
    numerics_variables: tuple[str, ...] = ()
    # `fake_attention` holds what flash kernels hold.
    flash_attention: bool = False
    flash_window: bool = False
    fused_adamw: bool = True
    fused_operators: FusedOperators | None = None

    @property
    def ray_environment(self) -> dict[str, str]:
        return {}

    def available(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def name(self) -> str:
        return TYPE

    def rank_environment(self, local_ranks: int, ranks: int = 1) -> dict[str, str]:
        return {}

    def deterministic_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {}

    def port_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {}

    def activate(self, local_rank: int) -> torch.device:
        _register()
        return torch.device(TYPE, 0)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def memory(self) -> Memory:
        return Memory(0, 0, 0, 0)

    def profiler(self) -> Profiler:
        raise NotImplementedError("nothing runs on a fake device")

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        return None


@contextmanager
def fake_world(device: FakeDevice, ranks: int, shape: MeshSection) -> Iterator[World]:
    """The first of so many ranks, alone in this process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    on = device.activate(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group(device.collectives, rank=0, world_size=ranks, store=FakeStore())
    try:
        yield World(0, ranks, 0, on, form_mesh(device, ranks, shape), shape=shape)
    finally:
        dist.destroy_process_group()


class _Flash(torch.autograd.Function):
    """Output and one number per query and head are kept for the backward pass, scores are not."""

    @staticmethod
    def forward(
        ctx: Any, query_SHLD: torch.Tensor, key_SGKD: torch.Tensor, value_SGKD: torch.Tensor
    ) -> torch.Tensor:
        out_SHLD = query_SHLD.new_empty(*query_SHLD.shape[:-1], value_SGKD.shape[-1])
        lse_SHL = query_SHLD.new_empty(query_SHLD.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query_SHLD, key_SGKD, value_SGKD, out_SHLD, lse_SHL)
        return out_SHLD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query_SHLD, key_SGKD, value_SGKD, _, _ = ctx.saved_tensors
        return tuple(torch.empty_like(x) for x in (query_SHLD, key_SGKD, value_SGKD))


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    out: torch.Tensor = _Flash.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out


@contextmanager
def fake_attention() -> Iterator[None]:
    """In place of torch's own, which would take a device that it does not know for one without a kernel."""
    kept = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _flash
    try:
        yield
    finally:
        F.scaled_dot_product_attention = kept
