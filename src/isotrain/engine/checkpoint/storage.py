"""Copies of checkpoints in object storage, which has no rename: one exists if its marker does."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from isotrain.engine.checkpoint.layout import MANIFEST, MARKER, checked_manifest, parse_step, step_name
from isotrain.errors import CheckpointError, install

FIELD = "trainer.checkpoint_storage"
RUN = "run.json"
# Object stores limit the number of parts of a file, so that parts must be large for large files.
PART_BYTES = 64 << 20
_BLOCK = 4 << 20


class StorageError(CheckpointError):
    """The storage could not be reached or used: that says nothing about what is in it."""


class Storage:
    """A directory of checkpoints behind a URL.

        <url>/run.json                              the recipe and data that the checkpoints belong to
        <url>/step-00000020/rank-00000.safetensors
        <url>/step-00000020/manifest.json
        <url>/step-00000020/COMPLETE                written last, removed first

    Errors of the many kinds that file systems raise become StorageErrors.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise StorageError(f"{FIELD} needs fsspec: {install('storage')}") from error
        self.url = url.rstrip("/")
        try:
            # Listings are not cached: other ranks and machines write there.
            options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
            if self.url.startswith("file:"):
                options = {"auto_mkdir": True}
            self._fs, root = url_to_fs(self.url, **options)
        except (ImportError, ValueError, OSError) as error:
            raise StorageError(
                f"{FIELD}: {self.url} cannot be opened ({error}); install the package that it names"
            ) from error
        self._root = str(root).rstrip("/")

    def steps(self) -> list[int]:
        """Steps that have files, newest first, whether or not they are complete."""
        with self._explained("be listed"):
            self._fs.invalidate_cache()
            if not self._fs.isdir(self._root):
                return []
            names = [
                str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)
            ]
        return sorted({step for name in names if (step := parse_step(name)) is not None}, reverse=True)

    def is_complete(self, step: int) -> bool:
        with self._explained("be read"):
            return bool(self._fs.exists(self._path(step, MARKER)))

    def manifest(self, step: int) -> bytes:
        """The manifest of a complete checkpoint; ValueError says what is wrong with it."""
        marker = self._read(self._path(step, MARKER))
        if marker is None:
            raise ValueError("it was not finished (no COMPLETE marker)")
        data = self._read(self._path(step, MANIFEST))
        if data is None:
            raise ValueError("manifest.json is missing")
        checked_manifest(data, marker, step_name(step))
        return data

    def download(self, step: int, name: str, expected: dict[str, Any], target: Path) -> None:
        """One file, compared with what the manifest says of it; ValueError says what is wrong with it."""
        path = self._path(step, name)
        with self._explained("be read"):
            size = self._fs.size(path) if self._fs.exists(path) else None
        if size is None:
            raise ValueError(f"{name} is missing")
        if size != expected["size"]:
            raise ValueError(f"{name} has {size} bytes instead of {expected['size']}")
        with self._explained("be read"):
            digest = hashlib.sha256()
            with self._fs.open(path, "rb") as source, target.open("wb") as file:
                while block := source.read(_BLOCK):
                    digest.update(block)
                    file.write(block)
        if digest.hexdigest() != expected["sha256"]:
            raise ValueError(f"{name} is damaged (SHA-256 differs)")

    def open_file(self, step: int, name: str) -> BinaryIO:
        """To write a rank's file. The marker of an earlier save goes first: its files are overwritten."""
        with self._explained("be written"):
            self._remove(self._path(step, MARKER))
            self._fs.makedirs(self._path(step), exist_ok=True)
            file: BinaryIO = self._fs.open(self._path(step, name), "wb", block_size=PART_BYTES)
            return file

    def commit(self, step: int, manifest: str) -> None:
        """All files are there: from here on it is a checkpoint."""
        data = manifest.encode()
        with self._explained("be written"):
            self._fs.pipe_file(self._path(step, MANIFEST), data)
            self._fs.pipe_file(self._path(step, MARKER), hashlib.sha256(data).hexdigest().encode())

    def remove_old(self, newest: int, keep: int) -> None:
        """Keeps the last complete ones up to `newest`; without its marker, none is a checkpoint any more."""
        steps = [step for step in self.steps() if step <= newest]
        complete = [step for step in steps if self.is_complete(step)]
        for step in set(steps) - set(complete[:keep]):
            # What cannot be removed now is tried again after the next save.
            with contextlib.suppress(StorageError), self._explained("be removed"):
                self._remove(self._path(step, MARKER))
                self._fs.rm(self._path(step), recursive=True)

    def run(self) -> dict[str, Any] | None:
        """Recipe and data that the checkpoints belong to; None if nothing was stored there yet."""
        data = self._read(f"{self._root}/{RUN}")
        if data is None:
            return None
        try:
            content = json.loads(data)
            if isinstance(content, dict) and all(
                isinstance(content[key], dict) for key in ("recipe", "data")
            ):
                return content
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise CheckpointError(f"{FIELD}: {self.url}/{RUN} was not written by isotrain; set another URL")

    def claim(self, recipe: dict[str, Any], data: dict[str, str]) -> None:
        with self._explained("be written"):
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(
                f"{self._root}/{RUN}", json.dumps({"recipe": recipe, "data": data}, indent=1).encode()
            )

    def _path(self, step: int, name: str = "") -> str:
        # Only from numbers and fixed names: nothing that is read there can lead out of the directory.
        return "/".join(filter(None, (self._root, step_name(step), name)))

    def _read(self, path: str) -> bytes | None:
        with self._explained("be read"):
            self._fs.invalidate_cache()
            return bytes(self._fs.cat_file(path)) if self._fs.exists(path) else None

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(path)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # each service has its own kinds
            raise StorageError(
                f"{FIELD}: {self.url} cannot {what} ({type(error).__name__}: {error})"
            ) from error


def open_storage(url: str | None) -> Storage | None:
    return Storage(url) if url else None


class StoredCopy:
    """A rank's file on its way to the storage, beside the local one, which an error does not touch."""

    def __init__(self, storage: Storage | None, step: int, name: str) -> None:
        self.error: str | None = None
        self._file: BinaryIO | None = None
        if storage is not None:
            with self._failure_recorded():
                self._file = storage.open_file(step, name)

    def write(self, data: memoryview) -> None:
        if self._file is not None and self.error is None:
            with self._failure_recorded():
                self._file.write(data)

    def close(self) -> None:
        if self._file is not None:
            with self._failure_recorded():
                self._file.close()

    @contextmanager
    def _failure_recorded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a service; the local checkpoint goes on
            self.error = self.error or f"{type(error).__name__}: {error}"
