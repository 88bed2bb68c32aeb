"""The checkpoint to start from: a local one, one fetched from the storage, or a copy of another run's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from isotrain.engine.checkpoint.layout import (
    MANIFEST,
    MARKER,
    WRITING,
    checked_manifest,
    newest_complete,
    step_directory,
    step_name,
    steps_in,
    sync,
)
from isotrain.engine.checkpoint.reader import CheckpointReader, newest_valid
from isotrain.engine.checkpoint.storage import Storage, StorageError
from isotrain.engine.checkpoint.writer import commit_directory, remove
from isotrain.engine.world import World
from isotrain.errors import CheckpointError
from isotrain.observe.run_directory import RunDirectory


def resume_point(
    root: Path, world: World, storage: Storage | None
) -> tuple[CheckpointReader | None, list[str]]:
    """As `newest_valid`; a newer one of the storage becomes a local one first."""
    reader, complaints = newest_valid(root, world)
    if storage is None:
        return reader, complaints
    refused: list[str] = []
    for step in _newer_steps(storage, world, reader.step if reader else -1):
        problem = _fetch(storage, step, root, world)
        if problem is None:
            # Complaints about local ones do not matter any more.
            return CheckpointReader(step_directory(root, step)), refused
        refused.append(f"checkpoint {step_name(step)} of {storage.url} is not used: {problem}")
    if refused and not reader:
        refused.append(f"no valid checkpoint in {storage.url}")
    return reader, [*complaints, *refused]


class LostCheckpoint(NamedTuple):
    """A checkpoint that was complete once and cannot be used now."""

    step: int
    fatal: bool
    """Whether no other one is left: to start from the first step is the user's decision."""
    words: str


def lost_checkpoint(
    run: RunDirectory, world: World, reader: CheckpointReader | None, storage: Storage | None = None
) -> LostCheckpoint | None:
    """Whether a newer checkpoint than `reader`, the one to resume from, was saved; the same on all ranks.

    A disk that is not mounted looks like a run that was killed before its first checkpoint, except that
    `saved.json` names one.
    """
    saved, error = 0, None
    if world.is_main:
        try:
            stored = (step for step in storage.steps() if storage.is_complete(step)) if storage else ()
            saved = max(run.saved_step(), newest_complete(run.checkpoints) or 0, next(iter(stored), 0))
        except StorageError as met:
            error = met
    _raise_together(error, world)
    step, done = int(world.sum([saved])[0]), reader.step if reader else 0
    if step <= done:
        return None
    if reader is not None:
        words = f"the checkpoint of step {step} is lost: training again from step {done + 1}"
        return LostCheckpoint(step, False, f"{words}; earlier metrics are kept in {run.path}/earlier-N")
    where, also = str(run.checkpoints), ""
    if storage is not None:
        where, also = f"neither it nor {storage.url}", " and another trainer.checkpoint_storage"
    return LostCheckpoint(
        step,
        True,
        f"output: a checkpoint of step {step} was saved, but {where} has no valid one: mount or restore "
        f"{run.checkpoints} and run the same command again, or set trainer.resume=start_over{also} to move "
        "what is left to earlier-N and train from the first step",
    )


def _newer_steps(storage: Storage, world: World, than: int) -> list[int]:
    steps: list[int] = []
    error: StorageError | None = None
    if world.is_main:
        try:
            steps = [step for step in storage.steps() if step > than]
        except StorageError as met:
            error = met
    _raise_together(error, world)
    return [int(step) for step in world.from_main(steps)]


def _raise_together(error: StorageError | None, world: World) -> None:
    """A storage that does not respond ends the run: without it, steps might be trained a second time."""
    (failed,) = world.sum([error is not None])
    if failed:
        raise error or StorageError("another rank could not read trainer.checkpoint_storage")


def _fetch(storage: Storage, step: int, root: Path, world: World) -> str | None:
    """Bring it to the local directory, the ranks sharing the files; returns what is wrong with it."""
    target = step_directory(root, step)
    temporary = root / f"{WRITING}{target.name}"
    if world.is_main:
        remove(temporary)
        temporary.mkdir(parents=True)
    world.sum([0.0])  # from here on the directory is there
    flaw, error, manifest = None, None, b""
    try:
        manifest = storage.manifest(step)
        files = checked_manifest(manifest, None, target.name)["files"]
        for name in sorted(files)[world.rank :: world.size]:
            storage.download(step, name, files[name], temporary / name)
            sync(temporary / name)
    except StorageError as met:
        error = met
    except OSError as met:
        error = StorageError(f"{temporary} cannot be written: {met}")
    except ValueError as met:
        flaw = str(met)
    (flaws,) = world.sum([flaw is not None])
    try:
        _raise_together(error, world)
        if not flaws and world.is_main:
            commit_directory(temporary, target, manifest.decode())
    finally:
        if world.is_main:
            remove(temporary)
    world.sum([0.0])  # it is complete for all
    return (flaw or "another rank found a damaged file") if flaws else None


def copy_checkpoint(source: Path, step: int, target: Path) -> None:
    """From one directory of checkpoints to another; on one file system, both share the files' content."""
    original = step_directory(source, step)
    if not original.is_dir():
        there = ", ".join(map(str, reversed(steps_in(source)))) or "none"
        raise CheckpointError(
            f"{source} has no checkpoint of step {step} (there are: {there}); trainer.save_every and "
            "trainer.keep_checkpoints say which are kept"
        )
    try:
        reader = CheckpointReader(original)
        if problems := reader.problems():
            raise CheckpointError(f"{original} cannot be used: {'; '.join(problems)}")
        goal = step_directory(target, step)
        if goal.is_dir():
            CheckpointReader(goal)
            return
        temporary = target / f"{WRITING}{goal.name}"
        remove(temporary)
        temporary.mkdir(parents=True)
        # The marker last: without it, nothing of it is a checkpoint.
        for name in (*reader.files, MANIFEST, MARKER):
            _link_or_copy(original / name, temporary / name)
        os.rename(temporary, goal)
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{original} cannot be copied to {target} ({error})") from error


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
