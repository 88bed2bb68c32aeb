"""Messages of an interrupted run."""

from __future__ import annotations

from pathlib import Path

from isotrain.engine.checkpoint.layout import MARKER, WRITING, step_directory, steps_in

FINISHING = "interrupted; finishing the current checkpoint"


def is_writing(checkpoints: Path) -> bool:
    return any(checkpoints.glob(f"{WRITING}*"))


def how_to_go_on(checkpoints: Path) -> str:
    complete = (
        step for step in steps_in(checkpoints) if (step_directory(checkpoints, step) / MARKER).exists()
    )
    newest = next(complete, None)
    if newest is None:
        return "no checkpoint yet: the same command starts from the first step"
    return f"the same command resumes after step {newest}"
