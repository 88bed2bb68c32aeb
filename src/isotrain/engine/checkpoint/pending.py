"""A checkpoint that is still being written when somebody wants to end the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from isotrain.engine.checkpoint.layout import MARKER, WRITING, step_directory, steps_in

POLL_SECONDS = 0.05
# Most are written by then: what takes longer is told.
QUIET_SECONDS = 1.0


def wait_for_pending(root: Path, seconds: float, tell: Callable[[str], None]) -> None:
    """Wait until nothing is being written, as the file system shows it to a process that is no rank."""
    began, told = time.monotonic(), False
    while name := _pending(root):
        waited = time.monotonic() - began
        if waited > seconds:
            tell(f"warning: checkpoint {name} was not written within {seconds:g} s and is abandoned")
            return
        if waited > QUIET_SECONDS and not told:
            told = True
            tell(f"waiting up to {seconds:g} s for checkpoint {name}")
        time.sleep(POLL_SECONDS)


def _pending(root: Path) -> str | None:
    """One that ranks write into, or whose last mark is missing."""
    writing = sorted(entry.name for entry in root.glob(f"{WRITING}*"))
    if writing:
        return writing[-1].removeprefix(WRITING)
    newest = [step_directory(root, step) for step in steps_in(root)[:1]]
    return next((directory.name for directory in newest if not (directory / MARKER).exists()), None)


FINISHING = "interrupted; finishing the current checkpoint"


def is_writing(checkpoints: Path) -> bool:
    return any(checkpoints.glob(f"{WRITING}*"))


def newest_complete(checkpoints: Path) -> int | None:
    """The step of the newest checkpoint that was written to its end."""
    complete = (
        step for step in steps_in(checkpoints) if (step_directory(checkpoints, step) / MARKER).exists()
    )
    return next(complete, None)


def how_to_go_on(checkpoints: Path) -> str:
    newest = newest_complete(checkpoints)
    if newest is None:
        return "no checkpoint yet: the same command starts from the first step"
    return f"the same command resumes after step {newest}"
