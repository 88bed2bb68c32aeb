"""Copies a checkpoint of one run to where another run starts from it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from isotrain.engine.checkpoint.layout import MANIFEST, MARKER, WRITING, step_directory, steps_in
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.checkpoint.writer import remove
from isotrain.errors import CheckpointError


def copy_checkpoint(source: Path, step: int, target: Path) -> None:
    """From one directory of checkpoints to another; on one file system, both share the files' content."""
    found = step_directory(source, step)
    if not found.is_dir():
        there = ", ".join(map(str, reversed(steps_in(source)))) or "none"
        raise CheckpointError(
            f"{source} has no checkpoint of step {step} (there are: {there}); trainer.save_every and "
            "trainer.keep_checkpoints say which are kept"
        )
    try:
        reader = CheckpointReader(found)
        if problems := reader.problems():
            raise CheckpointError(f"{found} cannot be used: {'; '.join(problems)}")
        goal = step_directory(target, step)
        if goal.is_dir():
            CheckpointReader(goal)
            return
        temporary = target / f"{WRITING}{goal.name}"
        remove(temporary)
        temporary.mkdir(parents=True)
        # The marker last: without it, nothing of it is a checkpoint.
        for name in (*reader.files, MANIFEST, MARKER):
            _copy(found / name, temporary / name)
        os.rename(temporary, goal)
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{found} cannot be copied to {target} ({error})") from error


def _copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
