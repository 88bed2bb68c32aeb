"""SIGTERM: a checkpoint after the current step, and an end within the limit, in every process of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import npusim
import psutil
import pytest

from isotrain.engine.checkpoint.layout import newest_complete
from isotrain.recipe.schema import Recipe
from isotrain.trainers.preemption import PREEMPTED, Preemption, preemptible
from support import command, stable_metrics, tiny_recipe, write_recipe

HANG = 120.0
"""Seconds after which something that should have ended is taken for hanging."""

# A loop as the trainers have it, with a step that never ends unless `short`.
LOOP = """
import hashlib, os, signal, sys, time
from isotrain.trainers.preemption import Preempted, preemptible

limit, what = float(sys.argv[1]), sys.argv[2]
try:
    with preemptible(limit, closing=1.0) as preemption:
        if what == "start":
            print("ready", flush=True)
            time.sleep(600)
        if what == "fork":
            if (child := os.fork()) == 0:
                time.sleep(600)
            os.kill(child, signal.SIGTERM)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), preemption.requested, flush=True)
            sys.exit()
        for step in range(1, 1000):
            preemption.begin(step)
            if step == 3:
                print("ready", flush=True)
            if what == "stuck" and step == 3:
                hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
            time.sleep(600 if what == "long" and step == 3 else 0.05)
            if preemption.requested:
                print("saved", flush=True)
                preemption.saved()
                time.sleep(600 if what == "closing" else 0.0)
                raise Preempted
finally:
    print("left in order", flush=True)
"""


Loop = Callable[[float, str], "subprocess.Popen[str]"]


@pytest.fixture
def loop() -> Iterator[Loop]:
    started: list[subprocess.Popen[str]] = []

    def start(limit: float, what: str) -> subprocess.Popen[str]:
        run = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(limit), what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(run)
        assert run.stdout is not None
        if what != "fork":
            assert run.stdout.readline() == "ready\n"
        return run

    yield start
    for run in started:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def test_a_request_waits_for_the_end_of_the_step(loop: Loop) -> None:
    run = loop(HANG, "short")
    for _ in range(3):  # one request, though it comes from the process group and from a launcher
        run.send_signal(signal.SIGTERM)
    out, told = run.communicate(timeout=HANG)
    assert run.returncode == PREEMPTED == 143
    assert out == "saved\nleft in order\n"
    assert told.startswith("SIGTERM: saving a checkpoint after step ")
    assert told.endswith(f", ending within {HANG:g} s\n") and told.count("\n") == 1


def test_a_request_before_the_first_step_ends_the_run(loop: Loop) -> None:
    run = loop(HANG, "start")
    run.send_signal(signal.SIGTERM)
    out, told = run.communicate(timeout=HANG)
    assert run.returncode == PREEMPTED
    assert out == "left in order\n" and told == "SIGTERM: ending before the first step\n"


@pytest.mark.parametrize(
    ("what", "left", "words"),
    [
        ("long", "left in order\n", "step 3 did not end in time: ending without a new checkpoint"),
        ("stuck", "", "step 3 did not end in time: ending without a new checkpoint"),
        ("closing", "saved\n", "not everything has ended"),
    ],
)
def test_the_limit_ends_what_takes_longer(loop: Loop, what: str, left: str, words: str) -> None:
    """In Python it is interrupted; in a computation, or where it does not end by itself, the process ends."""
    run = loop(4, what)
    run.send_signal(signal.SIGTERM)
    out, told = run.communicate(timeout=HANG)
    assert run.returncode == PREEMPTED
    assert out == left and words in told


def test_a_second_request_ends_at_once(loop: Loop) -> None:
    run = loop(HANG + 60, "long")
    run.send_signal(signal.SIGTERM)
    time.sleep(2.5)
    assert run.poll() is None
    run.send_signal(signal.SIGTERM)
    out, told = run.communicate(timeout=HANG)
    assert run.returncode == PREEMPTED
    assert out == "left in order\n" and told.endswith("SIGTERM again: ending at once\n")


def test_signals_of_forked_processes_are_their_own(loop: Loop) -> None:
    run = loop(HANG, "fork")
    out, told = run.communicate(timeout=HANG)
    assert run.returncode == 0
    assert out == f"{-signal.SIGTERM} False\nleft in order\n" and told == ""


def test_nothing_stays_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with preemptible(HANG, closing=1.0) as preemption:
        assert signal.getsignal(signal.SIGTERM) == preemption.handle
    assert signal.getsignal(signal.SIGTERM) == before and not preemption.requested
    descriptor = signal.set_wakeup_fd(-1)
    assert descriptor == -1


def test_other_threads_get_no_signals() -> None:
    found: list[Preemption] = []

    def train() -> None:
        with preemptible(HANG, closing=1.0) as preemption:
            found.append(preemption)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before and not found[0].requested


class Job:
    """One start of a supervised run, in a process group of its own."""

    def __init__(self, recipe: Recipe, work: Path, *launcher: str) -> None:
        self.recipe, self.log = recipe, work / "log"
        start = [sys.executable, *launcher] if launcher else command()
        given = ["-m", "isotrain.cli.main"] if launcher else []
        path = write_recipe(recipe, work / "recipe.yaml")
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                [*start, *given, "train", str(path)],
                env={**npusim.environment(), "OMP_NUM_THREADS": "1", "TMPDIR": str(work)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_for_steps(self, count: int) -> list[psutil.Process]:
        """Until so many are done; returns all processes of the run."""
        metrics, deadline = Path(self.recipe.output) / "metrics.jsonl", time.monotonic() + 2 * HANG
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
            assert self.process.poll() is None and time.monotonic() < deadline, self.text
            time.sleep(0.02)
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def wait(self) -> int:
        try:
            return self.process.wait(HANG)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=5)
    return alive


def long_recipe(tiny: Path, output: Path, ranks: int = 1, **trainer: float) -> Recipe:
    return tiny_recipe(
        tiny,
        output,
        "cpu",
        device={"type": "cpu", "ranks": ranks},
        trainer={"steps": 100_000, "save_every": 0, "preemption_seconds": 60, **trainer},
        observe={"loggers": ["console"]},
    )


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("ranks", "to"),
    [
        (1, "process"),
        pytest.param(1, "group", marks=pytest.mark.slow),
        pytest.param(2, "process", marks=pytest.mark.slow),
        (2, "group"),
        pytest.param(2, "rank", marks=pytest.mark.slow),
    ],
)
def test_a_preempted_run_resumes_after_its_last_step(tiny: Path, tmp_path: Path, ranks: int, to: str) -> None:
    recipe = long_recipe(tiny, tmp_path / "run", ranks)
    job = Job(recipe, tmp_path)
    processes = job.wait_for_steps(3)
    assert len(processes) == (1 if ranks == 1 else 1 + ranks)
    if to == "group":
        os.killpg(job.process.pid, signal.SIGTERM)
    else:
        os.kill(processes[-1 if to == "rank" else 0].pid, signal.SIGTERM)
    assert job.wait() == PREEMPTED, job.text
    assert running(processes) == []
    step = newest_complete(tmp_path / "run" / "checkpoints")
    assert step is not None
    assert f"SIGTERM: saving a checkpoint after step {step}, ending within 60 s" in job.text, job.text
    assert job.text.endswith(f"preempted: the same command resumes after step {step}\n"), job.text
    assert [row["step"] for row in stable_metrics(tmp_path / "run")] == list(range(1, step + 1))
    assert not list(tmp_path.glob("isotrain-*"))  # what the launcher shares with its ranks
    ends = {"steps": step + 2, "save_every": 0}
    rest = Job(recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update=ends)}), tmp_path)
    assert rest.wait() == 0, rest.text
    assert f"resuming after step {step} of {step + 2}" in rest.text


@pytest.mark.heavy
def test_a_run_that_is_complete_says_so(tiny: Path, tmp_path: Path) -> None:
    """The request comes in the last step, or too late to matter."""
    recipe = long_recipe(tiny, tmp_path / "run", steps=4)
    job = Job(recipe, tmp_path)
    job.wait_for_steps(3)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() in (0, PREEMPTED)
    assert Job(recipe, tmp_path).wait() == 0


@pytest.mark.ranks
@pytest.mark.heavy
def test_a_step_that_hangs_ends_at_the_limit(tiny: Path, tmp_path: Path) -> None:
    """A stopped rank: the other waits for it in a collective, where nothing of Python can interrupt it."""
    job = Job(long_recipe(tiny, tmp_path / "run", 2, save_every=2, preemption_seconds=6), tmp_path)
    processes = job.wait_for_steps(5)
    second = next(p for p in processes if p.environ().get("RANK") == "1")
    second.suspend()
    before = newest_complete(tmp_path / "run" / "checkpoints")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == PREEMPTED, job.text
    assert running(processes) == []
    assert "did not end in time: ending without a new checkpoint" in job.text
    assert f"the same command resumes after step {before}" in job.text, job.text


@pytest.mark.slow
@pytest.mark.parametrize("to", ["process", "group"])
def test_ranks_of_torchrun_save_and_end(tiny: Path, tmp_path: Path, to: str) -> None:
    recipe = long_recipe(tiny, tmp_path / "run")
    job = Job(recipe, tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    processes = job.wait_for_steps(3)
    (os.kill if to == "process" else os.killpg)(job.process.pid, signal.SIGTERM)
    assert job.wait() != 0  # torchrun has an exit code of its own
    assert running(processes) == []
    step = newest_complete(tmp_path / "run" / "checkpoints")
    assert f"preempted: the same command resumes after step {step}\n" in job.text, job.text
