"""Counts the memory of fake tensors: how much there is at most, and what it is for."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_c10d: Any = dist.distributed_c10d  # its types leave out what is used here

WEIGHTS, OPTIMIZER, GRADIENTS, GATHERED = "weights", "optimizer state", "gradients", "gathered layers"
FORWARD, BACKWARD, UPDATE, INFERENCE = "activations", "backward pass", "update", "inference"


@dataclass
class Peak:
    """Bytes on the device at the worst moment of a phase, by what they are for."""

    parts: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


class Ledger(TorchDispatchMode):
    """Sees each operator and notes the storages of its results until they are freed.

    What depends on values that do not exist is answered as for all tokens: numbers are 1, masks all true.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.phase, self.purpose = WEIGHTS, WEIGHTS
        self.now: Counter[str] = Counter()
        self.on_host: Counter[str] = Counter()
        self.host_peak = 0
        self.peaks: dict[str, Peak] = {}
        self.communicators: set[tuple[str, bool]] = set()
        """By the name of the group of ranks, and whether it is for what goes from one of them to another."""
        self._entries: dict[int, tuple[int, str, bool]] = {}
        self._muted = False

    def enter(self, phase: str) -> None:
        """Count from now on for this phase."""
        self.phase = self.purpose = phase
        self._compare()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its local part comes here again
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            return 1.0 if args[0].is_floating_point() else 1
        if name == "aten::_pin_memory":
            return args[0]
        if name == "aten::nonzero":
            func, args = torch.ops.aten.new_zeros.default, (args[0], [args[0].numel(), args[0].dim()])
            kwargs = {"dtype": torch.int64}
        if name == "aten::index" and (chosen := _all_true(args)) is not None:
            args = (args[0], chosen)
        if (communicator := communicator_of(func, args, kwargs or {}, self.device_type)) is not None:
            self.communicators.add(communicator)
        made = func(*tree_map(self._without_values, args), **tree_map(self._without_values, kwargs or {}))
        purpose = GATHERED if name.startswith(("fsdp::", "c10d::", "_c10d_functional::")) else self.purpose
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not self._muted:
                self._note(tensor.untyped_storage(), tensor.device, purpose)
        return made

    def _without_values(self, argument: Any) -> Any:
        """With values torch would compute, on a device that cannot."""
        if isinstance(argument, FakeTensor):
            argument.constant = None
        elif type(argument) in (torch.Tensor, nn.Parameter):
            return self.mode.from_tensor(argument)
        return argument

    def _note(self, storage: torch.UntypedStorage, device: torch.device, purpose: str) -> None:
        key = storage._cdata
        if key in self._entries:
            return
        on_device = device.type == self.device_type
        if not on_device and device.type != "cpu":
            return
        self._entries[key] = (0, purpose, on_device)
        weakref.finalize(storage, self._forget, key)
        self._resize(key, storage.nbytes())

    def _forget(self, key: int) -> None:
        self._resize(key, 0)
        self._entries.pop(key, None)

    def _resize(self, key: int, size: int, purpose: str | None = None) -> None:
        before, was, on_device = self._entries[key]
        purpose = purpose or was
        held = self.now if on_device else self.on_host
        held[was] -= before
        held[purpose] += size
        self._entries[key] = (size, purpose, on_device)
        if size > before:
            self._compare()

    def _compare(self) -> None:
        total = sum(self.now.values())
        peak = self.peaks.setdefault(self.phase, Peak())
        if total > peak.bytes:
            peak.parts = {name: size for name, size in self.now.items() if size}
        self.host_peak = max(self.host_peak, sum(self.on_host.values()))

    def rename(self, tensors: list[torch.Tensor], purpose: str) -> None:
        """Say what existing tensors are for."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._entries:
                size, was, _ = self._entries[key]
                if was != purpose:
                    self._resize(key, size, purpose)

    def __enter__(self) -> Any:
        # Sharded tensors ask with tensors of the whole size how a result is sharded, on real devices too.
        ShardingPropagator._fake_mode_lock = _Mute(self)  # type: ignore[assignment]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        ShardingPropagator._fake_mode_lock = nullcontext()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextmanager
    def fake(self) -> Iterator[None]:
        """Within it tensors have no memory, and are counted.

        Also storages that are emptied and filled, as sharding does with whole layers.
        """
        resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._entries:
                self._resize(storage._cdata, size, GATHERED)
            return result

        # No mode sees this method: `MemTracker` of torch.distributed._tools, which knows neither these phases
        # nor what is in host memory, replaces it, too.
        torch.UntypedStorage.resize_ = noted  # type: ignore[assignment,method-assign]
        try:
            with self.mode, self, _FilledOnHost():
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def communicator_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str
) -> tuple[str, bool] | None:
    """What an operator needs to exchange tensors of the device: devices connect a group at its first use.

    The second value tells whether it sends to one other rank: some devices have other buffers for that.
    """
    space, _, name = func._schema.name.partition("::")
    if space not in ("c10d", "_c10d_functional"):
        return None
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    given |= kwargs
    if "group_name" in given:
        group = _c10d._resolve_process_group(given["group_name"])
    elif "process_group" in given:
        group = dist.ProcessGroup.unbox(given["process_group"])
    else:
        return None
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    if group.size() == 1 or all(tensor.device.type != device_type for tensor in tensors):
        return None
    return group.group_name, name in ("send", "recv_")


def can_count() -> bool:
    """Whether this torch lets the ledger tell placeholders from memory: 2.13 does, 2.10 not yet."""
    return hasattr(ShardingPropagator, "_fake_mode_lock")


class _FilledOnHost(TorchFunctionMode):
    """Values of `torch.tensor` go to a device as a tensor: torch would write them there, beside all modes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        device = options.pop("device", None) if func is torch.tensor else None
        result = func(*args, **options)
        return result if device is None else result.to(device)


class _Mute:
    """While it is entered, the ledger does not count."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def __enter__(self) -> None:
        self.ledger._muted = True

    def __exit__(self, *_: Any) -> None:
        self.ledger._muted = False


def _all_true(args: tuple[Any, ...]) -> list[Any] | None:
    """Indices without masks, for an operator whose result's size would depend on them."""
    indices = args[1]
    if not any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices):
        return None
    return [
        torch.arange(index.shape[0], device=index.device)
        if isinstance(index, torch.Tensor) and index.dtype == torch.bool
        else index
        for index in indices
    ]
