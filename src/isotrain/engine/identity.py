"""Which model a directory holds: a hash of what decides its outputs."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isotrain.engine.checkpoint.layout import sha256_of
from isotrain.errors import ModelError


def model_digest(directory: Path) -> str:
    """SHA-256 over the weights and `config.json`; where the directory is does not count."""
    files = sorted([directory / "config.json", *directory.glob("*.safetensors")])
    try:
        with ThreadPoolExecutor(4) as pool:  # hashing leaves the interpreter's lock
            sums = list(pool.map(sha256_of, files))
    except OSError as error:
        raise ModelError(f"model.path: {error.filename} cannot be read ({error.strerror})") from error
    named = (f"{file.name}\0{digest}\n" for file, digest in zip(files, sums, strict=True))
    return hashlib.sha256("".join(named).encode()).hexdigest()
