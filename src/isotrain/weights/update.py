"""A weight update: what engines are told of it, and from which ranks it comes. Plain values, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# In place of a version: what is sent are no weights.
REHEARSAL = -1
# Bytes per second: no update is slower on hardware that is used for training.
SLOWEST = 1e8


@dataclass(frozen=True)
class FileSource:
    """A file in shared memory, which can be read at any time, and again."""

    path: str
    transport: str = "file"

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class StoreSource:
    """The store of a sender, where it meets its receivers."""

    transport: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


Source = FileSource | StoreSource
# By transport.
SOURCES = {"file": FileSource, "broadcast": StoreSource, "ipc": StoreSource}


@dataclass(frozen=True)
class WeightUpdate:
    """An update as an engine is told it. Plain values only: it goes to other processes as JSON."""

    version: int
    """The step of the run after which these weights were taken; a step may have several updates."""
    sources: tuple[Source, ...]
    """Where the workers of the engine take them, in their order; one alone is that of all workers."""
    tensors: int
    bytes: int
    digest: str
    """Over names, types, shapes and bytes of all tensors in order; empty where it comes with the weights."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> WeightUpdate:
        """The inverse of `asdict`, after JSON."""
        sources = tuple(SOURCES[source["transport"]](**source) for source in values["sources"])
        return cls(**{**values, "sources": sources})

    def source(self, worker: int = 0) -> Source:
        """Where one worker takes them."""
        return self.sources[worker % len(self.sources)]


def update_limit(timeout: float, size: int) -> float:
    """Seconds until an update of so many bytes counts as failed; `timeout` is `rollout.update_timeout`."""
    return timeout + size / SLOWEST


@dataclass(frozen=True)
class Routes:
    """From which rank each worker of each engine takes its weights."""

    transport: str
    ranks: tuple[tuple[int, ...], ...]
    """By engine, of its workers in their order; one alone is that of all of them."""
    receivers: tuple[int, ...]
    """By rank: how many take its weights; 0 if it only helps to gather them."""
    hosts: tuple[str, ...]
    """By rank: the address on which it listens for them."""
    relays: Mapping[int, int] = field(default_factory=dict)
    """By engine on a machine without a rank: whose copy it reads."""
