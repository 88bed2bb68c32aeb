"""The interface behind which devices differ, and that of their fused operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class FusedAttention(Protocol):
    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        dropout: float = 0.0,
        query_ends: Sequence[int] = (),
        key_ends: Sequence[int] = (),
    ) -> torch.Tensor:
        """Causal attention in the layout of the query.

        With ends, which count from the first token of all: `query_THD` over `key_KGD` and `value_KGD`, where
        the last query of a segment sees all of its keys. Without: `query_SLHD` over `key_SLGD`, `value_SLGD`.
        """


@dataclass(frozen=True)
class FusedOperators:
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    """Input, weight and epsilon; the result has the wider type of the two tensors."""
    swiglu: Callable[[torch.Tensor], torch.Tensor]
    """From gate and up projection side by side, `(..., 2 * I)`: SiLU of the first times the second."""
    rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """`x_SLHD` turned by `cos_SL1D` and `sin_SL1D`, none of them above 1, as two halves."""
    attention: FusedAttention
    grouped_matmul: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """`rows_RM` times `weights_EMN`: the first `counts_E[0]` rows with the first matrix, the next ones with
    the second. The counts are whole numbers on the device, and their sum is R."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    allocated: int
    peak: int
    free: int
    """For all processes."""
    total: int


class Profiler(Protocol):
    """torch's profiler of this process and its device, or a vendor's that has the same methods."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def export_chrome_trace(self, path: str) -> None:
        """Write what was recorded to a file that ends in `.json`."""


class Device(Protocol):
    """Everything that differs between devices; the rest of the code asks here and never names one."""

    @property
    def type(self) -> str:
        """The torch device type."""

    @property
    def collectives(self) -> str:
        """Backends for `init_process_group`; host tensors can always be exchanged as well."""

    @property
    def interface_variable(self) -> str | None:
        """The environment variable that names the network interface of the device's own collectives."""

    @property
    def visible_devices_variable(self) -> str | None:
        """The environment variable that hides devices from a process."""

    @property
    def ray_resource(self) -> str:
        """Ray's name for such devices in requests and node descriptions."""

    @property
    def ray_environment(self) -> dict[str, str]:
        """Variables that keep Ray from choosing the devices of its workers: we choose them ourselves."""

    @property
    def numerics_variables(self) -> tuple[str, ...]:
        """Environment variables that change results, to be recorded with every run."""

    @property
    def flash_attention(self) -> bool:
        """Whether transformers' variable-length flash attention runs here."""

    @property
    def flash_window(self) -> bool:
        """Whether that flash attention respects a sliding window."""

    @property
    def experts(self) -> str:
        """transformers' implementation of a mixture's experts that is right here."""

    @property
    def fused_adamw(self) -> bool:
        """Whether AdamW has a fused kernel here."""

    @property
    def fused_operators(self) -> FusedOperators | None:
        """Operators that do the work of several at once, None where models run as they are."""

    def available(self) -> bool:
        """Whether at least one such device can be used by this process."""

    def count(self) -> int:
        """Devices that this process can see."""

    def name(self) -> str:
        """The model name of the device, for people."""

    def rank_environment(self, local_ranks: int, ranks: int = 1) -> dict[str, str]:
        """Variables that a rank needs before its first operator runs; `ranks` are those of all machines."""

    def deterministic_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables that make results repeatable, given what else is set. The first operator reads them."""

    def port_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables that keep the collectives of two processes on one device from the same ports.

        What the environment says of ports stays.
        """

    def activate(self, local_rank: int) -> torch.device:
        """Make one device this process's own."""

    def seed(self, seed: int) -> None:
        """Seed the host's and the device's generators."""

    def rng_state(self) -> dict[str, torch.Tensor]:
        """The state of the host's and the device's generators, as byte tensors."""

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Put back what `rng_state` returned."""

    def synchronize(self) -> None:
        """Wait for the device's queue."""

    def memory(self) -> Memory:
        """Memory that this process holds on its device, and that is free there."""

    def profiler(self) -> Profiler:
        """Records operators of the host and the device from `start` to `stop`."""

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Dense peak in FLOP/s, None where it is not known."""
