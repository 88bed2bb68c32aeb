"""The run directory: where each file of a run is and how it is written."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isotrain.errors import DataError, RecipeError


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replaces `path` so that a reader, or a kill at any moment, meets the old file or the new one."""
    data = content.encode() if isinstance(content, str) else content
    # A name of its own, so that two writers cannot rename each other's half-written file into place.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    # The rename itself is durable only once the directory is; file systems that cannot sync one say so.
    with contextlib.suppress(OSError):
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class RunDirectory:
    """The files of one run. Opening it touches nothing, so that a report can read where it may not write."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.resolved = self.path / "resolved.json"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.log = self.path / "log.txt"
        self.status = self.path / "status.json"
        self.plots = self.path / "plots"
        self.layer_trace = self.path / "layer_trace"
        self.score_tests = self.path / "score_tests"
        self.trajectories = self.path / "trajectories"

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        recipe_text: str,
        resolved: Mapping[str, Any],
        environment: Mapping[str, Any],
    ) -> RunDirectory:
        """Starts a run in `path`, or again: the caller has looked at `resolved`."""
        run = cls(path)
        starts = run.starts()
        try:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
            write_atomically(run.recipe, recipe_text)
            write_atomically(run.environment, _to_json({"starts": [*starts, dict(environment)]}))
            # Last, because its presence is what says that a run was started here.
            write_atomically(run.resolved, _to_json(dict(resolved)))
        except OSError as error:
            raise RecipeError(
                f"output: cannot use {run.path} as a run directory ({error.strerror or error}): "
                "set output to a writable directory"
            ) from error
        return run

    def add_to_start(self, facts: Mapping[str, Any]) -> None:
        """What is known of the newest start only once its model is built."""
        *before, newest = self.starts()
        write_atomically(self.environment, _to_json({"starts": [*before, {**newest, **facts}]}))

    def starts(self) -> list[dict[str, Any]]:
        """The environment of every start of this run, newest last."""
        content = _read_object(self.environment)
        if content is None:
            return []
        starts = content.get("starts")
        if not isinstance(starts, list):
            raise DataError(f'{self.environment} has no list "starts"; move the file away to start afresh')
        return starts


def _to_json(content: Mapping[str, Any]) -> str:
    # `str` for what JSON has no word for, such as a path or a torch dtype.
    return json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n"


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); move the file away to start afresh") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object; move the file away to start afresh")
    return content
