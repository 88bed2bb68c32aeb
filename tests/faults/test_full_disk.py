"""A disk that fills up costs checkpoints, says which, and never the ones that are already there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import npusim
import pytest

from isotrain.engine.checkpoint import writer
from isotrain.engine.checkpoint.layout import steps_in
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.checkpoint.tensor_file import write_tensors
from isotrain.errors import CheckpointError, RecipeError
from isotrain.observe.metrics import MetricsLog, read_metrics
from isotrain.recipe.schema import Recipe
from isotrain.trainers.launch import launch
from support import command, run_cli, stable_metrics, tiny_recipe, write_recipe

pytestmark = pytest.mark.heavy

PAGE = 4096
STEPS = (2, 4, 6, 8)


class SmallDisk:
    """A file system of its own, of a size that can be changed while it is in use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def mount(self, size: int, *options: str) -> subprocess.CompletedProcess[str]:
        settings = ",".join([f"size={-(-size // PAGE) * PAGE}", *options])
        line = ["mount", "-t", "tmpfs", "-o", settings, "tmpfs", str(self.path)]
        return subprocess.run(line, capture_output=True, text=True)

    def resize(self, size: int) -> None:
        assert self.mount(size, "remount").returncode == 0

    def free(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self) -> Path:
        """Takes all the room there is."""
        filler = self.path / "filler"
        with open(filler, "ab", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * PAGE)
            except OSError:
                return filler


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs Linux and root")
    small = SmallDisk(tmp_path / "disk")
    mounted = small.mount(64 << 20)
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield small
    subprocess.run(["umount", "--lazy", str(small.path)], check=True)


def saving(tiny: Path, output: Path, ranks: int = 1, **trainer: Any) -> Recipe:
    return tiny_recipe(
        tiny,
        output,
        "cpu",
        device={"ranks": ranks},
        trainer={"steps": STEPS[-1], "save_every": STEPS[0], "keep_checkpoints": 3, **trainer},
        observe={"loggers": ["console"]},
    )


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with all the room it wants."""
    output = tmp_path_factory.mktemp("roomy") / "whole"
    launch(saving(tiny, output), "")
    return output


def checkpoint_size(run: Path) -> int:
    """What one checkpoint takes, in whole pages."""
    newest = run / "checkpoints" / f"step-{STEPS[-1]:08d}"
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in newest.iterdir())


def assert_valid(run: Path, *steps: int) -> None:
    """Exactly these checkpoints are there, whole, and nothing half-written beside them."""
    checkpoints = run / "checkpoints"
    assert sorted(steps_in(checkpoints)) == list(steps)
    for step in steps:
        assert CheckpointReader(checkpoints / f"step-{step:08d}").problems() == []
    assert len(list(checkpoints.iterdir())) == len(steps)


def test_the_run_goes_on_and_ends_with_an_error_if_the_last_one_is_lost(
    tiny: Path, disk: SmallDisk, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two checkpoints fit, the third and the fourth do not; with more room the same command finishes."""
    recipe = saving(tiny, disk.path / "run")
    disk.resize(int(2.5 * checkpoint_size(whole)))
    with pytest.raises(CheckpointError, match=r"step-00000008 was not saved: rank 0: .*No space left"):
        launch(recipe, "")
    said = capsys.readouterr().out
    assert "warning: checkpoint step-00000006 was not saved: rank 0: " in said
    assert "No space left on device" in said and "training continues without it" in said
    assert stable_metrics(disk.path / "run") == stable_metrics(whole)
    assert_valid(disk.path / "run", 2, 4)
    disk.resize(64 << 20)
    launch(recipe, "")
    assert "resuming after step 4 of 8" in capsys.readouterr().out
    assert stable_metrics(disk.path / "run") == stable_metrics(whole)
    assert_valid(disk.path / "run", 4, 6, 8)


@pytest.mark.slow
def test_through_the_command_line_it_is_a_message_and_exit_code_1(
    tiny: Path, tmp_path: Path, disk: SmallDisk, whole: Path
) -> None:
    disk.resize(int(1.5 * checkpoint_size(whole)))
    file = write_recipe(saving(tiny, disk.path / "run"), tmp_path / "recipe.yaml")
    done = run_cli("train", str(file), check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: checkpoint step-00000008 was not saved" in done.stderr
    assert [f"step-0000000{step} was not saved" in done.stdout for step in (2, 4, 6)] == [False, True, True]
    assert_valid(disk.path / "run", 2)


def test_a_disk_that_is_full_for_a_while_costs_one_checkpoint(
    tiny: Path,
    disk: SmallDisk,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[str] = []

    def sometimes_full(file: Any, *arguments: Any) -> Any:
        calls.append(file._file.name)
        filler = disk.fill() if len(calls) == 2 else None
        try:
            return write_tensors(file, *arguments)
        finally:
            if filler:
                filler.unlink()

    monkeypatch.setattr(writer, "write_tensors", sometimes_full)
    launch(saving(tiny, disk.path / "run"), "")
    said = capsys.readouterr().out
    assert said.count("was not saved") == 1 and "step-00000004 was not saved" in said
    assert_valid(disk.path / "run", 2, 6, 8)
    assert stable_metrics(disk.path / "run") == stable_metrics(whole)


@pytest.mark.slow
def test_leftovers_do_not_pile_up(tiny: Path, disk: SmallDisk, whole: Path) -> None:
    """Ten saves that fail take no more room than one."""
    recipe = saving(tiny, disk.path / "run", steps=20, save_every=2)
    disk.resize(int(1.5 * checkpoint_size(whole)))
    with pytest.raises(CheckpointError, match="step-00000020 was not saved"):
        launch(recipe, "")
    assert_valid(disk.path / "run", 2)
    assert disk.free() > 0.3 * checkpoint_size(whole)


@pytest.mark.slow
def test_metrics_that_cannot_be_written_end_the_run_with_the_file_s_name(
    tiny: Path, tmp_path: Path, disk: SmallDisk
) -> None:
    """A step without its metrics would be missing for good: better stop, and go on when there is room."""
    recipe = saving(tiny, disk.path / "run", steps=150, save_every=10)
    metrics = disk.path / "run" / "metrics.jsonl"
    file = write_recipe(recipe, tmp_path / "recipe.yaml")
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command("train", str(file)), env=npusim.environment(), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
                time.sleep(0.01)
            filler = disk.fill()
            assert process.wait(timeout=120) == 1
        finally:
            process.kill()
            process.wait()
    said = (tmp_path / "log").read_text()
    assert f"error: output: cannot write {metrics} (No space left on device): free disk space" in said
    assert "Traceback" not in said
    done = len(read_metrics(metrics))
    filler.unlink()
    launch(recipe, "")
    assert 0 < done < 150 and [row["step"] for row in read_metrics(metrics)] == list(range(1, 151))


def test_a_log_on_a_full_disk_is_an_error_of_ours(disk: SmallDisk) -> None:
    path = disk.path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(1, {"train/loss": 1.0})
        disk.fill()
        with pytest.raises(RecipeError, match=r"cannot write .*metrics\.jsonl \(No space left on device\)"):
            for step in range(2, 1000):
                log.append(step, {"train/loss": 1.0})
    # What was written before is read, the torn line is not.
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    # To cut the torn line off takes room as well.
    with pytest.raises(RecipeError, match=r"cannot write .*metrics\.jsonl"):
        MetricsLog.resume(path, 1)


@pytest.mark.slow
def test_two_ranks_on_a_full_disk_do_not_wait_for_each_other(
    tiny: Path, tmp_path: Path, disk: SmallDisk, whole: Path
) -> None:
    disk.resize(int(1.75 * checkpoint_size(whole)))
    file = write_recipe(saving(tiny, disk.path / "run", ranks=2), tmp_path / "recipe.yaml")
    started = time.monotonic()
    done = run_cli("train", str(file), check=False, OMP_NUM_THREADS="1")
    assert done.returncode == 1 and time.monotonic() - started < 180
    assert "checkpoint step-00000008 was not saved" in done.stderr and "Traceback" not in done.stderr
    assert "warning: checkpoint step-00000004 was not saved" in done.stdout
    assert sorted(steps_in(disk.path / "run" / "checkpoints")) == [2]
