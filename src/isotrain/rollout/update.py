"""A weight update as it is announced to an engine: where it is, and how to know that it is whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightUpdate:
    """Plain values only: it goes to engines in other processes as JSON."""

    version: int
    """The step of the run after which these weights were taken; a step may have several updates."""
    address: str
    """The file in shared memory; between machines, `host:port` of the collective's store."""
    tensors: int
    bytes: int
    digest: str
    """Over names, types, shapes and bytes of all tensors in order."""
