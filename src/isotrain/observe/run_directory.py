"""The run directory: where each file of a run is and how it is written."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from isotrain.errors import DataError, RecipeError
from isotrain.files import is_link_out, parse_json, read_regular

# Size limit of the JSON files of a run; environments of many starts are the largest.
LARGEST_JSON = 64 << 20
# Left in a run directory by the trackers of `observe.loggers`.
TRACKERS = ("trackers.json", "tensorboard", "wandb", "swanlab", "mlflow")


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
        self.lock = self.path / ".lock"
        self.recipe = self.path / "recipe.yaml"
        self.resolved = self.path / "resolved.json"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.saved = self.path / "saved.json"
        """The newest step that was saved: distinguishes lost checkpoints from a run that has none yet."""
        self.log = self.path / "log.txt"
        self.status = self.path / "status.json"
        self.plots = self.path / "plots"
        self.layer_trace = self.path / "layer_trace"
        self.score_tests = self.path / "score_tests"
        self.trajectories = self.path / "trajectories"
        self.profile = self.path / "profile"

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
            raise cannot_use(run.path, error) from error
        return run

    def add_to_start(self, facts: Mapping[str, Any]) -> None:
        """Add facts about the newest start that are known only once its model is built."""
        *before, newest = self.starts()
        write_atomically(self.environment, _to_json({"starts": [*before, {**newest, **facts}]}))

    def written(self) -> list[Path]:
        """Everything that a run writes here, whether or not it is there; its start last."""
        results = [self.checkpoints, self.metrics, self.log, self.status, self.plots, self.layer_trace]
        results += [
            self.score_tests,
            self.trajectories,
            self.profile,
            *(self.path / name for name in TRACKERS),
        ]
        return [*results, self.saved, self.recipe, self.environment, self.resolved]

    def links_out(self) -> Iterator[Path]:
        """Links among what a run writes, at any depth, that lead out of the run directory."""
        for path in (self.lock, *self.written()):
            if path.is_symlink() and is_link_out(path, self.path):
                yield path
        waiting = [path for path in self.written() if not path.is_symlink() and path.is_dir()]
        while waiting:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_symlink() and is_link_out(Path(entry.path), self.path):
                        yield Path(entry.path)
                    elif entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))

    def saved_step(self) -> int:
        """The newest step of which a checkpoint was complete; 0 if there was none."""
        step = (_read_object(self.saved) or {}).get("step")
        return step if type(step) is int and step > 0 else 0

    def keep_history(self, done: int) -> Path | None:
        """Copy the metrics aside if steps after `done` are trained again for an unusual reason.

        Usual is to go on from the newest checkpoint that was saved. Returns the copy.
        """
        saved, copy = self.saved_step(), None
        if (done == 0 or saved > done) and self.metrics.exists():
            metrics = read_regular(self.metrics)
            if metrics:
                copy = self._new_earlier() / self.metrics.name
                write_atomically(copy, metrics)
        if saved > done:
            write_saved(self.saved, done)
        return copy

    def set_aside(self) -> Path | None:
        """Move what an earlier run has written to `earlier-N`; returns that, or None if there is nothing.

        A kill on the way leaves `saved`, which then names missing checkpoints.
        """
        present = [path for path in self.written() if os.path.lexists(path)]
        if not present:
            return None
        target = self._new_earlier()
        for path in present:
            # A link or mount stays: it is where this user wants checkpoints to be.
            if path == self.checkpoints and (path.is_symlink() or os.path.ismount(path)):
                _move_into(path / target.name, list(path.glob("step-*")))
            else:
                _move_into(target, [path])
        return target

    def _new_earlier(self) -> Path:
        for number in count(1):
            target = self.path / f"earlier-{number}"
            with contextlib.suppress(FileExistsError):
                target.mkdir()
                return target
        raise AssertionError("there are always more numbers")

    def starts(self) -> list[dict[str, Any]]:
        """The environment of every start of this run, newest last."""
        content = _read_object(self.environment)
        if content is None:
            return []
        starts = content.get("starts")
        if not isinstance(starts, list):
            raise DataError(f'{self.environment} has no list "starts"; move the file away to start afresh')
        return starts


def write_saved(path: Path, step: int) -> None:
    write_atomically(path, json.dumps({"step": step}) + "\n")


def cannot_use(path: Path, error: OSError) -> RecipeError:
    return RecipeError(
        f"output: cannot use {path} as a run directory ({error.strerror or error}): "
        "set output to a writable directory"
    )


def _move_into(target: Path, paths: Iterable[Path]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in paths:
        os.rename(path, target / path.name)


def _to_json(content: Mapping[str, Any]) -> str:
    # `str` for what JSON has no word for, such as a path or a torch dtype.
    return json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n"


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        content = parse_json(read_regular(path, LARGEST_JSON).decode())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}); move the file away to start afresh") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object; move the file away to start afresh")
    return content
