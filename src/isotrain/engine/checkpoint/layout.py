"""Names, manifest and validity of a checkpoint directory."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
MARKER = "COMPLETE"
WRITING = ".writing-"
FORMAT = 1


def step_directory(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def steps_in(root: Path) -> list[int]:
    """Steps that have a directory, newest first, whether or not it is valid."""
    names = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    return sorted(
        (int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d+)", name))), reverse=True
    )


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
    if not marker.is_file():
        raise ValueError("it was not finished (no COMPLETE marker)")
    if not manifest.is_file() or sha256_of(manifest) != marker.read_text().strip():
        raise ValueError("manifest.json is damaged")
    content: dict[str, Any] = json.loads(manifest.read_text())
    if content["format"] != FORMAT:
        raise ValueError(f"it has format {content['format']}, this version reads {FORMAT}")
    return content


def problem_in(directory: Path, name: str, expected: dict[str, Any]) -> str | None:
    """What is wrong with one file of a checkpoint."""
    path = directory / name
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != expected["size"]:
        return f"{name} has {path.stat().st_size} bytes instead of {expected['size']}"
    if sha256_of(path) != expected["sha256"]:
        return f"{name} is damaged (SHA-256 differs)"
    return None
