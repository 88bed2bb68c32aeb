"""Which model a directory holds: a hash of what decides its outputs."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isotrain.errors import ModelError

_BLOCK = 1 << 22


def model_digest(directory: Path) -> str:
    """SHA-256 over the weights and `config.json`; where the directory is does not count."""
    files = sorted([directory / "config.json", *directory.glob("*.safetensors")])
    try:
        with ThreadPoolExecutor(4) as pool:  # hashing leaves the interpreter's lock
            sums = list(pool.map(_file_digest, files))
    except OSError as error:
        raise ModelError(f"model.path: {error.filename} cannot be read ({error.strerror})") from error
    named = (f"{file.name}\0{digest}\n" for file, digest in zip(files, sums, strict=True))
    return hashlib.sha256("".join(named).encode()).hexdigest()


def _file_digest(file: Path) -> str:
    total = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            total.update(block)
    return total.hexdigest()
