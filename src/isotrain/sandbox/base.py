"""The interface of sandboxes: a Python program in, what it printed and how it ended out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Ending = Literal["exit", "time", "memory", "output"]
MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one program may use, with everything that it starts."""

    seconds: float = 10.0
    """Wall-clock time, including the start of the sandbox."""
    memory: int = 1 << 30
    """Bytes: of address space for each process, and of memory for all of them together."""
    processes: int = 16
    """Processes and threads."""
    output: int = MIB
    """Bytes on stdout, and as many on stderr."""
    disk: int = 64 * MIB
    """Bytes in all files in /tmp together."""
    open_files: int = 64
    """Of one process."""


@dataclass(frozen=True)
class Outcome:
    ended: Ending
    """`exit`: by itself; otherwise the limit at which it was killed, or `memory` after a MemoryError."""
    exit_code: int | None
    """128 + n after signal n; None where it was killed for a limit."""
    stdout: str
    stderr: str
    seconds: float

    @property
    def succeeded(self) -> bool:
        return self.ended == "exit" and self.exit_code == 0


class Sandbox(Protocol):
    def start(self) -> None:
        """Try it with a program of ours; raises `SandboxError` with what to change."""

    def run(self, program: str, stdin: str = "", seconds: float | None = None) -> Outcome:
        """Run Python source, for at most `seconds` if that is less than the limit; from any thread.

        Whatever the program does is an outcome; `SandboxError` means that the sandbox itself failed."""

    def close(self) -> None:
        """End all programs that still run, and refuse further ones."""


def ended_by_memory(exit_code: int | None, stderr: str) -> bool:
    """Whether Python was refused memory and did not handle it: the kernel itself says nothing."""
    return bool(exit_code) and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError")
