"""`isotrain train --restarts`: what is started again, what is not, and who gets the signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import npusim
import psutil
import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.cli.train import LONGEST_PAUSE, check_restarts, pause_before, reason_to_restart
from isotrain.engine.checkpoint.layout import MARKER, newest_complete, step_directory
from isotrain.errors import (
    RETRYABLE,
    CheckpointError,
    DataError,
    EngineLost,
    ModelError,
    RankLost,
    RecipeError,
    RewardError,
    WeightUpdateError,
    WorkerFailed,
    WorkerLost,
)
from isotrain.recipe.load import write_resolved
from isotrain.trainers.launch import LAUNCHER_VARIABLE, RECIPE_FILE, SOURCE_FILE
from isotrain.trainers.launch import _error as launch_error
from isotrain.trainers.launch import main as run_rank
from isotrain.trainers.preemption import PREEMPTED
from support import command, run_cli, tiny_recipe, write_recipe

HANG = 120.0

# A training that ends as its list of orders says, one for each start: an exit code, a signal, `wait` or, for
# one that stays whatever is asked, `stay`; with `+`, after it has saved a checkpoint.
CHILD = """
import os, signal, sys, time
from pathlib import Path
work = Path(sys.argv[1])
orders = (work / "orders").read_text().split()
number = len(list(work.glob("start-*")))
(work / f"start-{number}").write_text(str(os.getpid()))
order = orders[number]
if order.endswith("+"):
    saved = work / "checkpoints" / f"step-{number + 1:08d}"
    saved.mkdir(parents=True)
    (saved / "COMPLETE").touch()
order = order.rstrip("+")
if order == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (work / "ready").touch()
    time.sleep(600)
if order == "stay":
    signal.signal(signal.SIGTERM, lambda *_: (work / "asked").touch())
    (work / "ready").touch()
    while True:
        time.sleep(1)
if order.startswith("-"):
    os.kill(os.getpid(), -int(order))
sys.exit(int(order))
"""
SUPERVISOR = """
import sys
from pathlib import Path
from isotrain.cli.train import supervise
assert "torch" not in sys.modules
work = sys.argv[1]
sys.exit(supervise([sys.executable, work + "/child.py", work], Path(work) / "checkpoints", int(sys.argv[2])))
"""


class Supervised:
    """A supervisor over children that end as they are told to."""

    def __init__(self, work: Path, orders: str, restarts: int) -> None:
        self.work = work
        (work / "child.py").write_text(CHILD)
        (work / "orders").write_text(orders)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(work), str(restarts)],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, name: str) -> int:
        """Until a child has written this file; returns the newest child's process id."""
        deadline = time.monotonic() + HANG
        while not (self.work / name).exists():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        return int((self.work / f"start-{self.starts - 1}").read_text())

    @property
    def starts(self) -> int:
        return len(list(self.work.glob("start-*")))

    def end(self) -> list[str]:
        """What it has said."""
        try:
            _, told = self.process.communicate(timeout=HANG)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return told.splitlines()


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[type]:
    started: list[Supervised] = []

    class Here(Supervised):
        def __init__(self, orders: str, restarts: int = 2) -> None:
            super().__init__(tmp_path, orders, restarts)
            started.append(self)

    yield Here
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_which_ends_are_followed_by_a_restart() -> None:
    assert reason_to_restart(-signal.SIGKILL) == "training was killed by SIGKILL (out of memory?)"
    assert reason_to_restart(-signal.SIGSEGV) == "training was killed by SIGSEGV"
    assert reason_to_restart(PREEMPTED) == "training was preempted"
    assert reason_to_restart(RETRYABLE) == "training failed"
    # Complete; an error of the user; a command that does not exist; somebody's Ctrl-C.
    assert [reason_to_restart(code) for code in (0, 1, 2, 130, -signal.SIGINT)] == [None] * 5


class DeviceFailed(RuntimeError):
    """As torch and the engines raise their own."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((kind("seen"), 1) for kind in (DataError, ModelError, CheckpointError, RewardError, WorkerFailed)),
        *((kind("seen"), RETRYABLE) for kind in (RankLost, WorkerLost, EngineLost, WeightUpdateError)),
        # Bugs and wrong data, which come again with the same command.
        *((kind("seen"), 1) for kind in (AssertionError, AttributeError, IndexError, KeyError, NameError)),
        *((kind("seen"), 1) for kind in (TypeError, ValueError, ZeroDivisionError, OverflowError)),
        *((kind("seen"), 1) for kind in (RecursionError, NotImplementedError, ImportError)),
        *((kind("seen"), 1) for kind in (FileNotFoundError, PermissionError, NotADirectoryError)),
        (json.JSONDecodeError("seen", "{", 1), 1),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "seen"), 1),
        # Devices, collectives, the network and the machine.
        *((kind("seen"), RETRYABLE) for kind in (RuntimeError, DeviceFailed, OSError, MemoryError, EOFError)),
        *((kind("seen"), RETRYABLE) for kind in (ConnectionResetError, TimeoutError, BrokenPipeError)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_what_may_pass_is_repeated(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command's exit code, and what becomes of the same error of one rank of several."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("isotrain.api.train", fail)
    shown = CliRunner().invoke(app, ["train", "tiny-sft"])
    assert shown.exit_code == code and "seen" in shown.output + shown.stderr
    assert (reason_to_restart(code) is None) == (code == 1)

    recipe = tiny_recipe(tmp_path, tmp_path, "cpu")
    write_resolved(recipe, tmp_path / RECIPE_FILE)
    (tmp_path / SOURCE_FILE).touch()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(LAUNCHER_VARIABLE, str(os.getppid()))
    monkeypatch.setattr("isotrain.trainers.launch.die_with_parent", lambda _: None)  # it is this process's
    monkeypatch.setattr("isotrain.trainers.launch.train_supervised", fail)
    assert run_rank(tmp_path) == 1
    raised = launch_error(tmp_path, {0: 1, 1: -signal.SIGTERM})
    assert raised.may_pass == (code == RETRYABLE) and "seen" in str(raised)


def test_pauses_grow_up_to_a_bound() -> None:
    assert [pause_before(restart) for restart in (1, 2, 3)] == [1.0, 2.0, 4.0]
    assert pause_before(50) == LONGEST_PAUSE


def test_a_child_is_started_again_until_it_is_complete(supervised: type) -> None:
    run = supervised(f"-9 {RETRYABLE} 0")
    assert run.end() == [
        "training was killed by SIGKILL (out of memory?); restart 1 of 2 in 1 s, from the first step",
        "training failed; restart 2 of 2 in 2 s, from the first step",
    ]
    assert run.process.returncode == 0 and run.starts == 3


def test_restarts_without_a_new_checkpoint_are_limited(supervised: type) -> None:
    run = supervised(f"{PREEMPTED} {RETRYABLE}+ -11 0", restarts=1)
    assert run.end() == [
        "training was preempted; restart 1 of 1 in 1 s, from the first step",
        "training failed; restart 1 of 1 in 1 s, after step 2",  # a checkpoint: the count begins anew
        "training was killed by SIGSEGV; giving up: 1 restart(s) brought no new checkpoint",
    ]
    assert run.process.returncode == 128 + signal.SIGSEGV and run.starts == 3


@pytest.mark.parametrize("code", [0, 1, 2])
def test_errors_that_need_a_change_end_at_once(supervised: type, code: int) -> None:
    run = supervised(str(code))
    assert run.end() == [] and run.process.returncode == code and run.starts == 1


@pytest.mark.parametrize("to", ["process", "group"])
def test_signals_are_the_childs_and_no_restart_follows(supervised: type, to: str) -> None:
    run = supervised("wait 0")
    child = run.wait_for("ready")
    (os.kill if to == "process" else os.killpg)(run.process.pid, signal.SIGTERM)
    assert run.end() == [] and run.process.returncode == PREEMPTED and run.starts == 1
    assert not psutil.pid_exists(child)


def test_a_child_that_is_killed_while_it_ends_was_preempted(supervised: type) -> None:
    """As by a scheduler that loses patience: a start resumes, and none follows here."""
    run = supervised("stay 0")
    child = run.wait_for("ready")
    run.process.send_signal(signal.SIGTERM)
    run.wait_for("asked")
    os.kill(child, signal.SIGKILL)
    assert run.end() == [] and run.process.returncode == PREEMPTED and run.starts == 1


def test_a_preemption_of_the_child_alone_is_followed_by_a_restart(supervised: type) -> None:
    run = supervised("wait 0")
    os.kill(run.wait_for("ready"), signal.SIGTERM)
    assert run.end() == ["training was preempted; restart 1 of 2 in 1 s, from the first step"]
    assert run.process.returncode == 0 and run.starts == 2


def test_a_signal_ends_the_pause(supervised: type) -> None:
    run = supervised(" ".join(["-9"] * 9), restarts=9)
    run.wait_for("start-2")  # a pause of 4 s follows
    time.sleep(0.5)
    run.process.send_signal(signal.SIGTERM)
    assert len(run.end()) == 3 and run.process.returncode == 143 and run.starts == 3


def test_the_child_ends_with_its_supervisor(supervised: type) -> None:
    run = supervised("wait 0")
    child = psutil.Process(run.wait_for("ready"))
    run.process.kill()
    assert psutil.wait_procs([child], timeout=HANG)[1] == []


def test_what_cannot_be_started_again_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecipeError, match=r"set trainer\.resume=auto"):
        check_restarts(tiny_recipe(tiny, tmp_path, "cpu", trainer={"resume": "never"}))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RecipeError, match="torchrun --max-restarts"):
        check_restarts(tiny_recipe(tiny, tmp_path, "cpu"))


def test_a_recipe_error_ends_at_once(tiny: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny, tmp_path / "run", "cpu", data={"max_length": 4})
    done = run_cli(
        "train", str(write_recipe(recipe, tmp_path / "recipe.yaml")), "--restarts", "3", check=False
    )
    assert done.returncode == 1 and "restart" not in done.stderr, done.stderr
    assert "data.max_length" in done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_training_resumes(tiny: Path, tmp_path: Path, ranks: int) -> None:
    """The whole child is killed, or one rank of two."""
    recipe = tiny_recipe(
        tiny,
        tmp_path / "run",
        "cpu",
        device={"type": "cpu", "ranks": ranks},
        trainer={"steps": 4000, "save_every": 2},
    )
    path, checkpoints = write_recipe(recipe, tmp_path / "recipe.yaml"), tmp_path / "run" / "checkpoints"
    run = subprocess.Popen(
        command("train", str(path), "--restarts", "1"),
        env={**npusim.environment(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        after = 0
        for _ in range(2):  # more often than --restarts says: each start makes progress
            deadline = time.monotonic() + 2 * HANG
            while (newest_complete(checkpoints) or 0) < after + 2:
                assert run.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            victim = psutil.Process(run.pid).children(recursive=True)[-1]
            victim.kill()
            psutil.wait_procs([victim], timeout=HANG)
            after = newest_complete(checkpoints) or 0
        deadline = time.monotonic() + 2 * HANG
        while (newest_complete(checkpoints) or 0) < after + 2:
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        _, told = run.communicate(timeout=HANG)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == PREEMPTED, told
    assert told.count("; restart 1 of 1 in 1 s, after step ") == 2, told
    assert "preempted: the same command resumes after step" in told
    assert (step_directory(checkpoints, newest_complete(checkpoints) or 0) / MARKER).exists()


def test_what_was_ignored_stays_ignored(tmp_path: Path) -> None:
    """Under `nohup`, the end of the terminal ends neither the supervisor nor training."""
    code = (
        "import signal, sys; from pathlib import Path\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from isotrain.cli.train import supervise\n"
        "child = 'import os; os.kill(os.getpid(), 1); os.kill(os.getppid(), 1)'\n"
        "sys.exit(supervise([sys.executable, '-c', child], Path(sys.argv[1]), 1))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, check=False)
    assert ended.returncode == 0
