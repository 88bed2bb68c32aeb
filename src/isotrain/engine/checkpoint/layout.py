"""Checkpoint directories: names, manifest, validity, and whether one is still being written."""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from isotrain.files import parse_json, read_regular

MANIFEST = "manifest.json"
MARKER = "COMPLETE"
WRITING = ".writing-"
FORMAT = 1
_LARGEST_MARKER = 4096


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a directory that has exactly the name of one."""
    digits = re.fullmatch(r"step-([0-9]{8,15})", name)
    return int(digits[1]) if digits and step_name(int(digits[1])) == name else None


def step_directory(root: Path, step: int) -> Path:
    return root / step_name(step)


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def steps_in(root: Path) -> list[int]:
    """Steps that have a directory, newest first, whether or not it is valid."""
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    return sorted((step for name in names if (step := parse_step(name)) is not None), reverse=True)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Make a file's or directory's content survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint; ValueError says what is wrong with it."""
    marker, manifest = directory / MARKER, directory / MANIFEST
    if not directory.is_dir():
        raise ValueError("there is no such checkpoint")
    if not marker.is_file():
        raise ValueError("it was not finished (no COMPLETE marker)")
    if not manifest.is_file():
        raise ValueError("manifest.json is missing")
    return checked_manifest(read_regular(manifest), read_regular(marker, _LARGEST_MARKER), directory.name)


def checked_manifest(data: bytes, marker: bytes | None, name: str) -> dict[str, Any]:
    """A manifest as the marker describes it (None: that was checked), of the checkpoint of this name."""
    if marker is not None and hashlib.sha256(data).hexdigest().encode() != marker.strip():
        raise ValueError("manifest.json is damaged (SHA-256 differs from the one in COMPLETE)")
    try:
        content: dict[str, Any] = parse_json(data)
    except ValueError as error:
        raise ValueError(f"manifest.json is not JSON ({error})") from error
    if flaw := _flaw(content, name):
        raise ValueError(f"manifest.json {flaw}")
    return content


def _flaw(content: Any, directory_name: str) -> str | None:
    """A manifest with the right sum may still come from elsewhere: nothing in it is believed unchecked."""
    if not isinstance(content, dict):
        return "is not a JSON object"
    if content.get("format") != FORMAT:
        return f"has format {content.get('format')!r:.40}, this version reads {FORMAT}"
    step, ranks, state, files = (content.get(key) for key in ("step", "ranks", "state", "files"))
    if not _is_count(step) or step_name(step) != directory_name:
        return f"is of step {step!r:.40}"
    if not isinstance(state, dict) or not all(_is_amount(value) for value in state.values()):
        return "has a state that is not made of counts and amounts"
    # All names are known beforehand, so that no manifest can lead out of its directory.
    if not _is_count(ranks) or not isinstance(files, dict) or not 0 < ranks == len(files):
        return "does not list one file for each rank"
    for name in map(rank_file, range(ranks)):
        expected = files.get(name)
        if not isinstance(expected, dict) or not _is_count(expected.get("size")):
            return f"does not describe {name}"
        if not isinstance(expected.get("sha256"), str):
            return f"does not describe {name}"
    return None


def _is_count(value: Any) -> TypeGuard[int]:
    # Up to 2**53 a number passes through JSON readers and float64 sums as it is.
    return type(value) is int and 0 <= value < 2**53


def _is_amount(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, float) and 0 <= value < math.inf)


def problem_in(directory: Path, name: str, expected: dict[str, Any]) -> str | None:
    """The flaw of one file of a checkpoint, if it has one."""
    path = directory / name
    try:
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {expected['size']}"
        if sha256_of(path) != expected["sha256"]:
            return f"{name} is damaged (SHA-256 differs)"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


POLL_SECONDS = 0.05
# Most checkpoints are written by then: a longer wait is announced.
QUIET_SECONDS = 1.0


def wait_for_pending(root: Path, seconds: float, tell: Callable[[str], None]) -> None:
    """Wait until nothing is being written, as the file system shows it to a process that is no rank."""
    began, announced = time.monotonic(), False
    while name := _pending(root):
        waited = time.monotonic() - began
        if waited > seconds:
            tell(f"warning: checkpoint {name} was not written within {seconds:g} s and is abandoned")
            return
        if waited > QUIET_SECONDS and not announced:
            announced = True
            tell(f"waiting up to {seconds:g} s for checkpoint {name}")
        time.sleep(POLL_SECONDS)


def _pending(root: Path) -> str | None:
    """The checkpoint that ranks write into, or whose last mark is missing."""
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


def resume_hint(checkpoints: Path) -> str:
    newest = newest_complete(checkpoints)
    if newest is None:
        return "no checkpoint yet: the same command starts from the first step"
    return f"the same command resumes after step {newest}"
