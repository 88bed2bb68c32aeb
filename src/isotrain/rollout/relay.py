"""A worker that receives weights for all engines of a machine, without anything that models need."""

from __future__ import annotations

from isotrain.rollout.base import WeightUpdate
from isotrain.rollout.broadcast import receive_update
from isotrain.rollout.transfer import remove_private_directory, write_update


class Relay:
    """On one machine: from the collective into a file in shared memory, which its engines can read again."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self) -> None:
        """It has nothing to make ready, and so can be replaced at any time between two updates."""

    def take(self, announced: WeightUpdate, timeout: float) -> WeightUpdate:
        with receive_update(announced, self.name, timeout) as contents:
            return write_update(contents.tensors, announced.version)

    def close(self) -> None:
        remove_private_directory()
