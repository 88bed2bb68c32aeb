"""Plain classes that the tests of cluster run as workers."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from isotrain.errors import DataError, NonFiniteError


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.lock = threading.Lock()


class Clerk:
    """Does what a test tells it."""

    def __init__(self, name: str = "clerk") -> None:
        if name == "bad":
            raise DataError("no such name: bad")
        self.name, self.count = name, 0

    def add(self, amount: int, factor: int = 1) -> int:
        self.count += amount * factor
        return self.count

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def pid(self) -> int:
        return os.getpid()

    def say(self, words: str) -> str:
        print(words, file=sys.stderr, flush=True)
        return f"{self.name}: {words}"

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def fail(self, kind: str) -> None:
        if kind == "ours":
            raise NonFiniteError("loss is nan at step 3")
        if kind == "unpicklable":
            raise Unpicklable("a", "b")
        if kind == "exit":
            sys.exit(5)
        raise KeyError("missing thing")

    def fail_or_wait(self, fails: bool) -> None:
        if fails:
            raise DataError("row 7 is broken")
        time.sleep(600)

    def numbers(self, count: int, fail_at: int = -1) -> Iterator[int]:
        for number in range(count):
            if number == fail_at:
                raise DataError(f"number {number} is broken")
            yield number

    def slowly(self, count: int, seconds: float) -> Iterator[int]:
        for number in range(count):
            time.sleep(seconds)
            yield number


class Tidy(Clerk):
    """Leaves a file unless it is closed; `name` is its path."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(name)
        self.seconds = seconds
        Path(name).write_text("shared")

    def close(self) -> None:
        time.sleep(self.seconds)
        Path(self.name).unlink()


class Rank:
    """A rank of a job, as the training engine's actors are."""

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type
        self.stack = ExitStack()

    def open_store(self, host: str | None) -> str:
        from isotrain.engine.world import open_store

        return open_store(host)

    def join(self, store: str) -> dict[str, Any]:
        from isotrain.device.detect import choose_device
        from isotrain.engine.world import join_world

        device = choose_device(self.device_type)
        self.world = self.stack.enter_context(join_world(device, store))
        return {
            "rank": self.world.rank,
            "local_rank": self.world.local_rank,
            "device": str(self.world.device),
            "interface": os.environ["GLOO_SOCKET_IFNAME"],
            "own interface": os.environ.get(device.interface_variable or ""),
            "pid": os.getpid(),
        }

    def sum(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.full((3,), value, device=self.world.device)
        dist.all_reduce(tensor)
        return float(tensor[0])

    def sum_alone(self, lonely: bool) -> None:
        """Only one rank enters the collective, so it waits; the other does something else."""
        if lonely:
            self.world.barrier()
        else:
            time.sleep(600)
