"""Trackers that metrics can go to besides `metrics.jsonl`."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from isotrain.errors import RecipeError, install
from isotrain.files import parse_json, read_regular
from isotrain.observe.run_directory import LARGEST_JSON, write_atomically

logger = logging.getLogger("isotrain")


class Logger(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardLogger:
    """Event files under `tensorboard/`, one for each start of the run, written without torch."""

    def __init__(self, run_directory: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        self._protos = _package("tensorboard", "tensorboard.compat.proto.event_pb2")
        self._summary = _package("tensorboard", "tensorboard.compat.proto.summary_pb2")
        records = _package("tensorboard", "tensorboard.summary.writer.record_writer")
        directory = run_directory / "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a directory in the order of their names, hence the padded time.
        file = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        # TensorBoard's own file writer hides a full disk in a thread; here the failing step raises.
        self._records = records.RecordWriter(open(directory / file, "xb", buffering=0))  # noqa: SIM115
        self._started = False
        self._add(file_version="brain.Event:2")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if not self._started:
            # Tells the reader to forget what a killed start wrote from this step on.
            start = self._protos.SessionLog(status=self._protos.SessionLog.START)
            self._add(step=step, session_log=start)
            self._started = True
        summary = self._summary.Summary()
        for name, value in values.items():
            summary.value.add(tag=name, simple_value=value)
        self._add(step=step, summary=summary)

    def close(self) -> None:
        self._records.close()

    def _add(self, **fields: Any) -> None:
        event = self._protos.Event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())


class TrackerLogger:
    """A run of a tracker that goes on where it was when it is opened again."""

    def __init__(self, run: Any, next_step: int = 0) -> None:
        self._run, self._next_step = run, next_step

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # The service keeps what a killed start sent, and may complain about each step that comes again.
        if step >= self._next_step:
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb(run_directory: Path, project: str, name: str, config: Mapping[str, Any]) -> Logger:
    """Weights & Biases; `WANDB_MODE=offline` keeps the run in `wandb/` until `wandb sync`."""
    wandb, identity = _package("wandb"), _tracker_id(run_directory)
    # A program may start several runs one after another.
    settings = {"id": identity, "resume": "allow", "reinit": "finish_previous"}
    run = wandb.init(project=project, name=name, dir=str(run_directory), config=dict(config), **settings)
    return TrackerLogger(run, run.step)


def _swanlab(run_directory: Path, project: str, name: str, config: Mapping[str, Any]) -> Logger:
    """SwanLab; `SWANLAB_MODE=offline` keeps the run in `swanlab/` until `swanlab sync`."""
    swanlab, directory = _package("swanlab"), run_directory / "swanlab"
    directory.mkdir(parents=True, exist_ok=True)
    settings = {"id": _tracker_id(run_directory), "resume": "allow", "reinit": True}
    run = swanlab.init(project=project, name=name, log_dir=str(directory), config=dict(config), **settings)
    return TrackerLogger(run)


class MlflowLogger:
    """A run of MLflow, in `mlflow/mlflow.db` unless `MLFLOW_TRACKING_URI` names a server.

    MLflow chooses a run's id, so this one is found again by a tag. A second tag has the last step, in
    the same request as the metrics: a resumed run does not repeat the steps that a killed start sent.
    """

    _ID, _STEP = "isotrain.id", "isotrain.step"

    def __init__(self, run_directory: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        # Nothing leaves the machine unless the user named a server. Its log would show the database's setup.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        mlflow = _package("mlflow")
        self._entities = _package("mlflow", "mlflow.entities")
        artifacts = None
        if mlflow.is_tracking_uri_set():
            self._client = mlflow.MlflowClient()
        else:
            _package(
                "mlflow", "mlflow.store.tracking.sqlalchemy_store"
            )  # `mlflow-skinny` alone has no database
            directory = (run_directory / "mlflow").resolve()
            directory.mkdir(parents=True, exist_ok=True)
            self._client = mlflow.MlflowClient(f"sqlite:///{directory / 'mlflow.db'}")
            artifacts = (directory / "artifacts").as_uri()
        experiment = self._client.get_experiment_by_name(project)
        place = experiment.experiment_id if experiment else self._client.create_experiment(project, artifacts)
        identity = _tracker_id(run_directory)
        known = self._client.search_runs([place], f"tags.`{self._ID}` = '{identity}'", max_results=1)
        if known:
            self._run, self._next_step = known[0].info.run_id, int(known[0].data.tags[self._STEP]) + 1
            self._client.update_run(self._run, status="RUNNING")
        else:
            tags = {self._ID: identity, self._STEP: "-1"}
            self._run = self._client.create_run(place, tags=tags, run_name=name).info.run_id
            self._next_step = 0
            # Only at the first start: MLflow refuses another value of a parameter.
            params = [self._entities.Param(key, value) for key, value in _flat(config)]
            for start in range(0, len(params), 100):
                self._client.log_batch(self._run, params=params[start : start + 100])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step < self._next_step:
            return
        now, tag = int(time.time() * 1000), self._entities.RunTag(self._STEP, str(step))
        metrics = [
            self._entities.Metric(_mlflow_name(key), value, now, step) for key, value in values.items()
        ]
        self._client.log_batch(self._run, metrics=metrics, tags=[tag])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each field under its name in the recipe, cut to the length that MLflow takes."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{key}", text[:500]


def _mlflow_name(metric: str) -> str:
    """MLflow refuses names with other characters: `reward/mean@4` becomes `reward/mean_at_4`."""
    return re.sub(r"[^\w.\- :/]", "_", metric.replace("@", "_at_"), flags=re.ASCII)


LOGGERS: dict[str, Callable[[Path, str, str, Mapping[str, Any]], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": _wandb,
    "swanlab": _swanlab,
    "mlflow": MlflowLogger,
}

# What to do if a tracker cannot be opened.
HINTS = {
    "tensorboard": "make the run directory writable",
    "wandb": "run `wandb login`, or set WANDB_MODE=offline",
    "swanlab": "run `swanlab login`, or set SWANLAB_MODE=offline",
    "mlflow": "check MLFLOW_TRACKING_URI, or unset it to log into the run directory",
}


class GuardedLogger:
    """A logger that may fail without stopping the run: at its first error it is dropped with one warning."""

    def __init__(self, name: str, logger: Logger, warn: Callable[[str], None]) -> None:
        self._name, self._warn = name, warn
        self._logger: Logger | None = logger

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._call(lambda logger: logger.write(step, values), f"at step {step}")

    def close(self) -> None:
        self._call(lambda logger: logger.close(), "while closing")
        self._logger = None

    def _call(self, action: Callable[[Logger], None], when: str) -> None:
        if self._logger is None:
            return
        try:
            action(self._logger)
        except Exception as error:
            self._logger = None
            self._warn(
                f"{self._name} failed {when} and gets no more metrics; metrics.jsonl has all of them. "
                f"({type(error).__name__}: {error})"
            )


def check_loggers(names: Iterable[str]) -> None:
    """Before models are loaded: are the packages of the trackers there, and the key of wandb?"""
    for kind in names:
        if kind in LOGGERS:
            _package(kind)
        if kind == "wandb" and not _wandb_has_key():
            raise _cannot_open(kind, "no API key")


def _wandb_has_key() -> bool:
    """Whether wandb could log in, or need not."""
    wandb = _package("wandb")
    try:
        return wandb.setup().settings.mode != "online" or bool(wandb.login(prompt=False, verify=False))
    except Exception as error:
        raise _cannot_open("wandb", error) from error
    finally:
        if wandb.run is None:
            wandb.teardown()  # it would keep the settings of now, and `WANDB_MODE` may change


def open_loggers(
    names: Iterable[str],
    *,
    run_directory: Path,
    project: str,
    name: str,
    config: Mapping[str, Any],
    warn: Callable[[str], None] = logger.warning,
) -> list[Logger]:
    """Open the named trackers; `console`, which a recipe lists beside them, is not one of them.

    A tracker that cannot be opened is an error, since the user can still fix it. One that fails later is
    dropped, and `warn` is called once.
    """
    opened: list[Logger] = []
    try:
        for kind in names:
            if kind == "console":
                continue
            if kind not in LOGGERS:
                known = ", ".join(["console", *LOGGERS])
                raise RecipeError(f"observe.loggers: unknown logger {kind!r}; use {known}")
            opened.append(GuardedLogger(kind, _open(kind, run_directory, project, name, config), warn))
    except BaseException:
        for logger in opened:
            logger.close()
        raise
    return opened


def _open(kind: str, run_directory: Path, project: str, name: str, config: Mapping[str, Any]) -> Logger:
    try:
        return LOGGERS[kind](run_directory, project, name, config)
    except RecipeError:
        raise
    except Exception as error:
        raise _cannot_open(kind, error) from error


def _cannot_open(kind: str, why: str | Exception) -> RecipeError:
    reason = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
    return RecipeError(
        f"observe.loggers: cannot open {kind} ({reason}): {HINTS[kind]}, "
        f"or remove {kind} from observe.loggers"
    )


def _package(extra: str, module: str | None = None) -> Any:
    try:
        return importlib.import_module(module or extra)
    except ImportError as error:
        raise RecipeError(
            f"observe.loggers: cannot import {extra} ({error}): {install(extra)}, "
            f"or remove {extra} from observe.loggers"
        ) from error


def _tracker_id(run_directory: Path) -> str:
    """The id under which trackers know this run, kept so that a resumed run goes on in the same curve.

    It is not made from the path: a new run in a directory that was cleared is a new run to a tracker too.
    """
    path = run_directory / "trackers.json"
    if path.exists():
        try:
            return str(parse_json(read_regular(path, LARGEST_JSON))["id"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RecipeError(
                f"{path} has no id for trackers ({error}); remove it to begin new curves"
            ) from error
    identity = uuid.uuid4().hex
    write_atomically(path, json.dumps({"id": identity}) + "\n")
    return identity
