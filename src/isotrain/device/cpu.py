"""The host processor as a training device."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from isotrain.device.base import Memory, Profiler


class Cpu:
    type = "cpu"
    collectives = "gloo"
    interface_variable = None
    visible_devices_variable = None
    ray_resource = "CPU"
    numerics_variables = (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "MKL_CBWR",
        "ATEN_CPU_CAPABILITY",
        "ONEDNN_MAX_CPU_ISA",
        "ONEDNN_DEFAULT_FPMATH_MODE",
    )
    flash_attention = False
    flash_window = False
    experts = "eager"
    fused_adamw = True
    fused_operators = None

    @property
    def ray_environment(self) -> dict[str, str]:
        return {}

    def available(self) -> bool:
        return True

    def count(self) -> int:
        return len(os.sched_getaffinity(0))

    def name(self) -> str:
        match = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
        return match.group(1) if match else "cpu"

    def rank_environment(self, local_ranks: int, ranks: int = 1) -> dict[str, str]:
        # Ranks that each use every core fight for them; a fixed share also fixes the order of sums.
        share = max(1, self.count() // local_ranks)
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(share)}

    def activate(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def deterministic_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {}

    def port_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {}

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {"host": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["host"])

    def synchronize(self) -> None:
        pass

    def memory(self) -> Memory:
        status = _read("/proc/self/status")
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = _kib(_read("/proc/meminfo"), "MemAvailable")
        return Memory(_kib(status, "VmRSS"), _kib(status, "VmHWM"), free, total)

    def profiler(self) -> Profiler:
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _kib(status: str, field: str) -> int:
    match = re.search(rf"{field}:\s*(\d+) kB", status)
    return int(match.group(1)) * 1024 if match else 0
