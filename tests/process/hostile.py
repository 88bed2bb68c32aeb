"""What tests with hostile programs share: limits, ways to run one, and a look at the host's processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from isotrain.process.bubblewrap import Bubblewrap
from isotrain.process.supervise import MIB, Limits, ProgramOutcome

# Programs bound themselves a little above these limits: a broken sandbox must fail a test, not the machine.
LIMITS = Limits(seconds=4.0, memory=512 * MIB, output=MIB, disk=8 * MIB)
# Of the wall clock, on a machine that does other things as well: the limit, the end, and the start.
BOUND = LIMITS.seconds + 15
SECRET = "correct horse battery staple"


def run(sandbox: Bubblewrap, program: str, stdin: str = "") -> ProgramOutcome:
    begun = time.monotonic()
    outcome = sandbox.run(program, stdin)
    assert time.monotonic() - begun < BOUND
    assert SECRET not in outcome.stdout + outcome.stderr
    return outcome


def refused(sandbox: Bubblewrap, statement: str) -> str:
    """The error that a statement raises in the sandbox."""
    program = (
        "import ctypes, os, socket, subprocess, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def check(result):\n"
        "    if result < 0:\n"
        "        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
        f"try:\n    {statement}\nexcept OSError as error:\n    print(type(error).__name__)\n"
        "else:\n    print('not refused')\n"
    )
    outcome = run(sandbox, program)
    assert outcome.succeeded, outcome.stderr
    return outcome.stdout.strip()


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def running(mark: str) -> list[int]:
    return [pid for pid in processes() if mark.encode() in cmdline(pid)]


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
