"""Names, manifest and validity of a checkpoint directory."""

from __future__ import annotations

import hashlib
import math
import os
import re
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
    found = re.fullmatch(r"step-([0-9]{8,15})", name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


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
    """What is wrong with one file of a checkpoint."""
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
