"""Sandboxes: a Python program in, what it printed and how it ended out; and the tool `python` of agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

BUBBLEWRAP = "bubblewrap"
LONGEST = 4000
"""Characters of a reply of `PythonTool`, by default."""

Ending = Literal["exit", "time", "memory", "output"]
MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of one program with everything that it starts."""

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
    """Descriptors of one process."""


@dataclass(frozen=True)
class ProgramOutcome:
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

    def run(self, program: str, stdin: str = "", seconds: float | None = None) -> ProgramOutcome:
        """Run Python source, for at most `seconds` if that is less than the limit; from any thread.

        Whatever the program does is an outcome; `SandboxError` means that the sandbox itself failed."""

    def close(self) -> None:
        """End all programs that still run, and refuse further ones."""


def ended_by_memory(exit_code: int | None, stderr: str) -> bool:
    """Whether Python was refused memory and did not handle it: the kernel itself says nothing."""
    return bool(exit_code) and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError")


def build_sandbox(where: str, limits: Limits, python: str | None = None) -> Sandbox:
    """`where`: `bubblewrap`, or the address of a SandboxFusion server, which has a Python of its own."""
    # Here, because both import this module.
    from isotrain.process.bubblewrap import Bubblewrap
    from isotrain.process.fusion import SandboxFusion

    return Bubblewrap(limits, python) if where == BUBBLEWRAP else SandboxFusion(where, limits)


class PythonTool:
    """Each call is a new program: nothing is kept between calls."""

    def __init__(self, where: str = BUBBLEWRAP, limits: Limits | None = None, longest: int = LONGEST) -> None:
        """`where`: `bubblewrap`, or a SandboxFusion server's address; `longest`: characters of a reply."""
        self._limits, self._longest = limits or Limits(), longest
        self._sandbox: Sandbox = build_sandbox(where, self._limits)

    def start(self) -> None:
        """Raises `SandboxError` where programs cannot be run."""
        self._sandbox.start()

    def run(self, code: str) -> str:
        """The program's output, and how it failed if it did; `SandboxError` if the sandbox failed."""
        outcome = self._sandbox.run(code)
        parts = [outcome.stdout, outcome.stderr, self._remark(outcome)]
        return "\n".join(part for text in parts if (part := self._cut(text.rstrip("\n"))))

    def close(self) -> None:
        self._sandbox.close()

    def _remark(self, outcome: ProgramOutcome) -> str:
        if outcome.ended == "time":
            return f"[killed after {self._limits.seconds:g} s]"
        if outcome.ended == "memory":
            return f"[out of memory: {self._limits.memory >> 20} MiB]"
        if outcome.ended == "output":
            return f"[killed after {self._limits.output} bytes of output]"
        return f"[exit code {outcome.exit_code}]" if outcome.exit_code else ""

    def _cut(self, text: str) -> str:
        """Start and end of a long text: the end of a traceback names the error."""
        if len(text) <= self._longest // 2:
            return text
        part = self._longest // 4
        return f"{text[:part]}\n[... {len(text) - 2 * part} characters left out ...]\n{text[-part:]}"
