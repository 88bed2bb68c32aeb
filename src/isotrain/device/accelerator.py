"""A device with a torch device module of its own: what such devices have in common; NVIDIA GPUs."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

import torch

from isotrain.device.base import FusedOperators, Memory, Profiler

# Ranks load models at different speeds, and the fastest waits for the slowest in the first collective.
MANY_RANKS, MANY_RANKS_CONNECT_SECONDS = 64, "1200"


@dataclass(frozen=True)
class Accelerator:
    type: str
    collectives: str
    interface_variable: str
    visible_devices_variable: str
    ray_resource: str
    numerics_variables: tuple[str, ...]
    flash_packages: tuple[str, ...]
    """Any of these packages gives transformers flash attention on this device."""
    rebuild_shared: str
    """torch's function for device memory of another process, as `module:name`."""
    profiler: Callable[[], Profiler]
    peak_bf16_tflops: dict[str, float] = field(default_factory=dict)
    """By whole words of the device's name; the longest match counts."""
    deterministic_variables: Callable[[Mapping[str, str]], dict[str, str]] = lambda environment: {}
    port_variables: Callable[[Mapping[str, str]], dict[str, str]] = lambda environment: {}
    connect_timeout_variable: str = ""
    """The environment variable that says how long its collectives wait for each other at the start."""
    prepare: Callable[[], None] = lambda: None
    """Run once the device is active, before the first operator."""
    flash_window: bool = True
    experts: str = "eager"
    """A loop over the experts: plain operators that every device has."""
    fused_adamw: bool = True
    fused_operators: FusedOperators | None = None

    @property
    def module(self) -> ModuleType:
        module: ModuleType = getattr(torch, self.type)
        return module

    @property
    def backend(self) -> str:
        """The device's own collectives."""
        backends = dict(part.split(":") for part in self.collectives.split(","))
        return backends[self.type]

    @property
    def ray_environment(self) -> dict[str, str]:
        # Ray would show each worker its own device as number 0, and a worker that requests none no device.
        return {f"RAY_EXPERIMENTAL_NOSET_{self.visible_devices_variable}": "1"}

    @property
    def flash_attention(self) -> bool:
        return any(importlib.util.find_spec(package) for package in self.flash_packages)

    def available(self) -> bool:
        return hasattr(torch, self.type) and bool(self.module.is_available())

    def count(self) -> int:
        return int(self.module.device_count()) if self.available() else 0

    def name(self) -> str:
        return str(self.module.get_device_name())

    def rank_environment(self, local_ranks: int, ranks: int = 1) -> dict[str, str]:
        # Host threads only feed the device: one per rank unless the user says otherwise.
        variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or "1"}
        if (name := self.connect_timeout_variable) and ranks >= MANY_RANKS:
            variables[name] = os.environ.get(name) or MANY_RANKS_CONNECT_SECONDS
        return variables | self.port_variables(os.environ)

    def activate(self, local_rank: int) -> torch.device:
        device = torch.device(self.type, local_rank)
        self.module.set_device(device)
        self.prepare()
        return device

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.module.manual_seed_all(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {"host": torch.get_rng_state(), "device": self.module.get_rng_state().cpu()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["host"])
        self.module.set_rng_state(state["device"])

    def synchronize(self) -> None:
        self.module.synchronize()

    def free_shared(self) -> None:
        """Free memory of this process that others had opened, and have closed."""
        collect = getattr(self.module, "ipc_collect", None)  # CUDA's allocator keeps it until it is asked
        if collect is not None:
            collect()

    def memory(self) -> Memory:
        free, total = self.module.mem_get_info()
        return Memory(self.module.memory_allocated(), self.module.max_memory_allocated(), free, total)

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        # Only the 16-bit peak is tabulated: float32 runs on other units or in reduced precision modes.
        if dtype not in (torch.bfloat16, torch.float16):
            return None
        name = self.name()
        matches = [part for part in self.peak_bf16_tflops if re.search(rf"\b{part}\b", name, re.IGNORECASE)]
        return self.peak_bf16_tflops[max(matches, key=len)] * 1e12 if matches else None


def _profiler() -> Profiler:
    activity = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[activity.CPU, activity.CUDA])


# Written against PyTorch's documented interface; not verified on hardware yet.
CUDA = Accelerator(
    type="cuda",
    collectives="cpu:gloo,cuda:nccl",
    rebuild_shared="torch.multiprocessing.reductions:rebuild_cuda_tensor",
    profiler=_profiler,
    interface_variable="NCCL_SOCKET_IFNAME",
    visible_devices_variable="CUDA_VISIBLE_DEVICES",
    ray_resource="GPU",
    numerics_variables=(
        "CUDA_VISIBLE_DEVICES",
        "CUBLAS_WORKSPACE_CONFIG",
        "NVIDIA_TF32_OVERRIDE",
        "NCCL_ALGO",
        "NCCL_PROTO",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    ),
    flash_packages=("flash_attn",),
    # transformers' own choice where torch has the kernel. Not verified on hardware yet.
    experts="grouped_mm",
    # Dense bf16 figures of the data sheets (SXM where there are several forms).
    peak_bf16_tflops={
        "A100": 312,
        "A800": 312,
        "H100": 989,
        "H800": 989,
        "H200": 989,
        "H20": 148,
        "B200": 2250,
        "L40S": 362,
        "A10": 125,
        "A30": 165,
        "RTX 4090": 165,
    },
    deterministic_variables=lambda environment: {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
)
