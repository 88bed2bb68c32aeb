"""Receivers of weights in processes of their own, for tests of the sender."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isotrain.weights.update import WeightUpdate

TIMEOUT = 5.0


class Receiver:
    def __init__(self, name: str, device: str = "cpu", environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("broadcast_child.py")), device],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return line.strip() if line == "ready\n" else json.loads(line)

    def order(
        self,
        update: WeightUpdate,
        damage: str = "",
        timeout: float = TIMEOUT,
        sums: bool = True,
        buffered: bool = False,
    ) -> None:
        assert self.process.stdin is not None
        order = {
            "name": self.name,
            "update": asdict(update),
            "damage": damage,
            "timeout": timeout,
            "sums": sums,
            "buffered": buffered,
        }
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def ready(*receivers: Receiver) -> Iterator[list[Receiver]]:
    """Once they can be given orders; they end with the block."""
    try:
        assert [receiver.read() for receiver in receivers] == ["ready"] * len(receivers)
        yield list(receivers)
    finally:
        for receiver in receivers:
            receiver.end()
