"""Speeds of engines and ranks from data sheets: bytes over bandwidth, operations over peak.

Nothing here is fitted. The efficiencies are round numbers, the same for all devices and models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from simulate.settings import Decode

BF16 = 2
TRAINING_OPERATIONS = 8  # of a parameter and token: forward, backward, and forward again (checkpointing)
FORWARD_OPERATIONS = 2


@dataclass(frozen=True)
class Device:
    name: str
    tera_operations: float
    """Dense bfloat16, a second."""
    terabytes_per_second: float
    memory_gb: float


@dataclass(frozen=True)
class Model:
    name: str
    billions: float
    active_billions: float
    layers: int
    key_value_heads: int
    head_size: int

    @property
    def gigabytes(self) -> float:
        return self.billions * BF16

    @property
    def cache_bytes_per_token(self) -> int:
        return 2 * BF16 * self.layers * self.key_value_heads * self.head_size


@dataclass(frozen=True)
class Efficiency:
    """Assumed shares of the data sheet's figures."""

    bandwidth: float = 0.8
    training: float = 0.35
    prefill: float = 0.5
    token_overhead: float = 0.002
    """Seconds of each decoding step that do not depend on the model: scheduling, launches, sampling."""
    memory: float = 0.85
    """Of the device's memory, for weights and cache."""


def decode_of(model: Model, device: Device, devices: int, efficiency: Efficiency) -> Decode:
    """Of an engine over so many devices. A decoding step of many sequences reads all experts of a mixture."""
    bandwidth = 1e12 * device.terabytes_per_second * devices * efficiency.bandwidth
    operations = 1e12 * device.tera_operations * devices * efficiency.prefill
    per_token = FORWARD_OPERATIONS * model.active_billions * 1e9 / operations
    return Decode(
        base=efficiency.token_overhead + 1e9 * model.gigabytes / bandwidth,
        per_sequence=per_token,
        per_cached_token=model.cache_bytes_per_token / bandwidth,
        prefill_per_token=per_token,
    )


def sequences_at_once(
    model: Model, device: Device, devices: int, tokens: float, efficiency: Efficiency, most: int = 256
) -> int:
    """That fit into the memory beside the weights, each with so many tokens on average."""
    free = 1e9 * (device.memory_gb * devices * efficiency.memory - model.gigabytes)
    fits = int(free / (model.cache_bytes_per_token * tokens))
    if fits < 1:
        raise ValueError(f"{model.name} does not fit into {devices} x {device.name}")
    return min(most, fits)


def training_seconds_per_token(
    model: Model,
    device: Device,
    ranks: int,
    efficiency: Efficiency,
    operations: float = TRAINING_OPERATIONS,
) -> float:
    """Of all ranks together, without attention's part, which grows with the length."""
    peak = 1e12 * device.tera_operations * ranks * efficiency.training
    return operations * model.active_billions * 1e9 / peak


@dataclass(frozen=True)
class Transfer:
    fixed: float
    gb_per_second: float

    def seconds(self, gigabytes: float) -> float:
        return self.fixed + gigabytes / self.gb_per_second


def line_through(first: tuple[float, float], second: tuple[float, float]) -> Transfer:
    """Of two pairs of gigabytes and seconds."""
    (gb_1, seconds_1), (gb_2, seconds_2) = first, second
    per_gb = (seconds_2 - seconds_1) / (gb_2 - gb_1)
    if per_gb <= 0:
        raise ValueError("the larger transfer must take longer")
    return Transfer(seconds_1 - per_gb * gb_1, 1.0 / per_gb)


@dataclass(frozen=True)
class Failures:
    """`hours_between`: mean time between failures of one device, with its part of machine and network."""

    hours_between: float
    restart_seconds: float
    """From a failure of a rank to the first new step."""
    engine_seconds: float = 0.0
    """That one engine is away after a failure; the run goes on."""

    def an_hour(self, devices: int) -> float:
        return devices / self.hours_between

    def lost_share(self, ranks: int, save_every: float, save_seconds: float) -> float:
        """Of the run's time, for steps done again, restarts and saving; 1 if it does not get anywhere."""
        between = 3600.0 / self.an_hour(ranks)
        again = self.restart_seconds + (save_every + save_seconds) / 2
        return min(1.0, save_seconds / (save_every + save_seconds) + again / between)

    def best_interval(self, ranks: int, save_seconds: float) -> float:
        """Seconds between checkpoints that lose least (Young's formula)."""
        return math.sqrt(2.0 * save_seconds * 3600.0 / self.an_hour(ranks))

    def engines_away(self, engines: int, devices_of_one: int) -> float:
        """Share of engines that are being replaced."""
        return min(1.0, self.an_hour(engines * devices_of_one) * self.engine_seconds / 3600.0 / engines)
