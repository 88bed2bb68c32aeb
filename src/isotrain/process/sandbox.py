"""Sandboxes: a Python program in, what it printed and how it ended out; and the tool `python` of agents."""

from __future__ import annotations

from typing import Protocol

from isotrain.process.bubblewrap import Bubblewrap
from isotrain.process.fusion import SandboxFusion
from isotrain.process.supervise import Limits as Limits  # part of the documented interface of the tool
from isotrain.process.supervise import ProgramOutcome

BUBBLEWRAP = "bubblewrap"
LONGEST = 4000
"""Characters of a reply of `PythonTool`, by default."""


class Sandbox(Protocol):
    def start(self) -> None:
        """Try it with a program of ours; raises `SandboxError` with what to change."""

    def run(self, program: str, stdin: str = "", seconds: float | None = None) -> ProgramOutcome:
        """Run Python source, for at most `seconds` if that is less than the limit; from any thread.

        Whatever the program does is an outcome; `SandboxError` means that the sandbox itself failed."""

    def close(self) -> None:
        """End all programs that still run, and refuse further ones."""


def build_sandbox(where: str, limits: Limits, python: str | None = None) -> Sandbox:
    """`where`: `bubblewrap`, or the address of a SandboxFusion server, which has a Python of its own."""
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
