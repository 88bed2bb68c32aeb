"""The tool `python` of agents: source code in, what it printed out."""

from __future__ import annotations

from isotrain.sandbox.base import Limits, Outcome, Sandbox
from isotrain.sandbox.build import BUBBLEWRAP, build_sandbox

LONGEST = 4000
"""Characters of a reply, by default."""


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
        """What the program printed, and how it failed if it did; `SandboxError` if the sandbox failed."""
        outcome = self._sandbox.run(code)
        parts = [outcome.stdout, outcome.stderr, self._remark(outcome)]
        return "\n".join(part for text in parts if (part := self._cut(text.rstrip("\n"))))

    def close(self) -> None:
        self._sandbox.close()

    def _remark(self, outcome: Outcome) -> str:
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
