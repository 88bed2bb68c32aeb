from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from isotrain.errors import RecipeError
from isotrain.observe import loggers
from isotrain.observe.loggers import GuardedLogger, Logger, open_loggers


def open_one(name: str, directory: Path, **options: Any) -> Logger:
    settings = {"project": "p", "name": "n", "config": {"seed": 1, "model": {"path": "x"}}}
    (logger,) = open_loggers(["console", name], run_directory=directory, **settings, **options)
    return logger


def names_of_files(directory: Path, pattern: str) -> set[str]:
    """The names of a tracker's files once all hold the metric.

    A tracker's own process may still be writing its file when `finish` returns.
    """
    deadline = time.monotonic() + 20
    while True:
        counts = {file: file.read_bytes().count(b"train/loss") for file in directory.glob(pattern)}
        if counts and all(counts.values()):
            return {file.name for file in counts}
        assert time.monotonic() < deadline, f"not in all files: {counts}"
        time.sleep(0.05)


def read_scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_events_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logger = open_one("tensorboard", tmp_path)
    for step in (1, 2, 3):
        logger.write(step, {"train/loss": 0.5 * step, "train/lr": 1.0})
    assert read_scalars(tmp_path, "train/loss") == [(1, 0.5), (2, 1.0), (3, 1.5)], "each step is out at once"
    logger.close()
    assert read_scalars(tmp_path, "train/lr") == [(1, 1.0), (2, 1.0), (3, 1.0)]


def test_tensorboard_resumes_over_a_killed_start(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    killed = open_one("tensorboard", tmp_path)
    for step in range(1, 6):
        killed.write(step, {"a": float(step)})
    resumed = open_one("tensorboard", tmp_path)
    for step in range(4, 8):
        resumed.write(step, {"a": 10.0 * step})
    resumed.close()
    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0), (6, 60.0), (7, 70.0)]
    assert read_scalars(tmp_path, "a") == expected


def test_tensorboard_needs_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = (
        "import sys, pathlib; from isotrain.observe.loggers import open_loggers\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "s, = open_loggers(['tensorboard'], run_directory=out, project='', name='', config={})\n"
        "s.write(1, {'a': 1.0}); s.close(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


@pytest.mark.heavy
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for first in (1, 3):
        logger = open_one("wandb", tmp_path, warn=pytest.fail)
        for step in range(first, first + 3):
            logger.write(step, {"train/loss": 1.0})
        logger.close()
    names = names_of_files(tmp_path, "wandb/offline-run-*/run-*.wandb")
    assert len(names) == 1, "a resumed run keeps its id"


def test_wandb_skips_steps_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        step = 6
        logged: tuple[int, ...] = ()

        def log(self, values: dict[str, float], step: int) -> None:
            self.logged += (step,)

    run = Run()
    monkeypatch.setattr(pytest.importorskip("wandb"), "init", lambda **_: run)
    logger = open_one("wandb", tmp_path)
    for step in range(4, 9):
        logger.write(step, {"a": 1.0})
    assert run.logged == (6, 7, 8)


@pytest.mark.heavy
def test_swanlab_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    for first in (1, 3):
        logger = open_one("swanlab", tmp_path, warn=pytest.fail)
        for step in range(first, first + 3):
            logger.write(step, {"train/loss": 1.0})
        logger.close()
    names = names_of_files(tmp_path, "swanlab/run-*/run-*.swanlab")
    assert len(names) == 1, "a resumed run keeps its id"


@pytest.mark.parametrize("name", sorted(loggers.LOGGERS))
def test_a_missing_package_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RecipeError, match=rf"pip install '\.\[{name}\]' in a clone"):
        open_one(name, tmp_path)


def test_an_unknown_logger_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="use console, tensorboard, wandb, swanlab, mlflow"):
        open_one("neptune", tmp_path)


class Fragile:
    def __init__(self, *arguments: object) -> None:
        self.steps: list[int] = []
        self.closed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step == 2:
            raise OSError(28, "No space left on device")
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True
        raise RuntimeError("no network")


def test_a_failing_logger_is_dropped_with_one_warning() -> None:
    warnings: list[str] = []
    inner = Fragile()
    logger = GuardedLogger("tracker", inner, warnings.append)
    for step in (1, 2, 3):
        logger.write(step, {})
    logger.close()
    assert inner.steps == [1]
    assert len(warnings) == 1 and "tracker failed at step 2" in warnings[0] and "No space" in warnings[0]


def test_a_logger_that_fails_to_close_does_not_fail_the_run() -> None:
    warnings: list[str] = []
    logger = GuardedLogger("tracker", Fragile(), warnings.append)
    logger.close()
    logger.close()
    assert len(warnings) == 1 and "while closing" in warnings[0]


def test_a_logger_that_cannot_be_opened_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Fragile()

    def refuse(*arguments: object) -> Logger:
        raise ConnectionError("not logged in")

    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", lambda *_: opened)
    monkeypatch.setitem(loggers.LOGGERS, "wandb", refuse)
    with pytest.raises(RecipeError, match=r"not logged in.*wandb login"):
        open_loggers(["tensorboard", "wandb"], run_directory=tmp_path, project="p", name="n", config={})
    assert opened.closed, "the ones that were open already are closed"


@pytest.mark.parametrize(
    "variables, refused",
    [({}, True), ({"WANDB_MODE": "offline"}, False), ({"WANDB_API_KEY": "0" * 40}, False)],
    ids=["no key", "offline", "key"],
)
def test_a_missing_key_is_told_before_models_are_loaded(
    tmp_path: Path, variables: dict[str, str], refused: bool
) -> None:
    pytest.importorskip("wandb")
    check = "from isotrain.observe.loggers import check_loggers; check_loggers(['console', 'wandb'])"
    own = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, "-c", check],
        env={**own, "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if refused:
        assert "cannot open wandb (no API key): run `wandb login`, or set WANDB_MODE=offline" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
