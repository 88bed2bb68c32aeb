"""Killed at any moment and started again, a run gives the metrics of one that nobody touched, bit for bit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import npusim
import pytest

from isotrain.engine.checkpoint.layout import MARKER, WRITING
from isotrain.recipe.schema import Recipe
from isotrain.trainers.launch import launch
from support import command, stable_metrics, tiny_recipe, write_recipe

pytestmark = pytest.mark.heavy

SECONDS_TO_END = 30.0


@dataclass(frozen=True)
class Kill:
    """After some steps of a start: at a random moment, or while a checkpoint is being written."""

    steps: int
    moment: float
    """Step durations to wait after that."""
    writing: bool
    victim: str
    """`all` processes, the `launcher`, or the number of a rank."""


def plan(seed: int, count: int, victims: tuple[str, ...]) -> list[Kill]:
    draw = random.Random(seed)
    return [
        Kill(draw.randint(3, 8), 2 * draw.random(), number % 2 == 1, draw.choice(victims))
        for number in range(count)
    ]


class Job:
    """One start of a command, with all its processes."""

    def __init__(self, recipe: Path, log: Path) -> None:
        self.log = log
        self._seen: set[int] = set()
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command("train", str(recipe)),
                # A killed launcher cannot remove the directory its ranks meet in.
                env={**npusim.environment(), "OMP_NUM_THREADS": "1", "TMPDIR": str(log.parent)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def steps(self) -> int:
        """Steps that this start has taken."""
        return sum(line.startswith("step ") for line in self.log.read_text().splitlines())

    def ranks(self) -> list[int]:
        """Process ids of the launcher's children by rank; of the process itself where it is the only one."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        by_rank = {variables_of(int(pid)).get("RANK"): int(pid) for pid in children}
        found = [by_rank[str(rank)] for rank in range(len(children)) if str(rank) in by_rank]
        self._seen.update(found)
        return found or [self.process.pid]

    def wait_for_steps(self, count: int, timeout: float = 180) -> float:
        """Until so many steps are done; returns the seconds one took."""
        deadline, first = time.monotonic() + timeout, 0.0
        while (done := self.steps()) < count:
            assert self.process.poll() is None, f"ended after {done} steps:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, self.log.read_text()
            first = first or (time.monotonic() if done else 0.0)
            time.sleep(0.002)
        return (time.monotonic() - first) / (count - 1) if count > 1 and first else 0.05

    def kill(self, victim: str) -> None:
        """Ends the victim; then all others must end by themselves."""
        ranks = self.ranks()
        if victim == "all":
            for pid in {self.process.pid, *ranks}:
                os.kill(pid, signal.SIGKILL)
        elif victim == "launcher":
            self.process.kill()
        else:
            os.kill(ranks[int(victim)], signal.SIGKILL)
        code = self.process.wait(timeout=SECONDS_TO_END)
        assert code == (1 if victim.isdigit() and len(ranks) > 1 else -signal.SIGKILL)
        deadline = time.monotonic() + SECONDS_TO_END
        while survivors := [pid for pid in ranks if is_alive(pid)]:
            assert time.monotonic() < deadline, f"ranks {survivors} of {ranks} go on:\n{self.log.read_text()}"
            time.sleep(0.02)

    def end(self) -> None:
        """Nothing of a failed test goes on; ranks are in sessions of their own."""
        if self.process.poll() is None:
            self.ranks()
            self.process.kill()
            self.process.wait()
        for pid in self._seen:
            if "ISOTRAIN_STORE" in variables_of(pid):  # and not somebody who got the number since
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def variables_of(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@contextlib.contextmanager
def started(recipe: Path, log: Path) -> Iterator[Job]:
    job = Job(recipe, log)
    try:
        yield job
    finally:
        job.end()


def carry_out(kill: Kill, job: Job, checkpoints: Path) -> str:
    """Kills the job as planned; returns what that left half-done."""
    step_seconds = job.wait_for_steps(kill.steps)
    if kill.writing:
        deadline = time.monotonic() + 60
        while not any(checkpoints.glob(f"{WRITING}*")):
            assert time.monotonic() < deadline and job.process.poll() is None, job.log.read_text()
    else:
        time.sleep(kill.moment * step_seconds)
    job.kill(kill.victim)
    unfinished = [path.name for path in checkpoints.glob("step-*") if not (path / MARKER).exists()]
    return ", ".join([*unfinished, *(path.name for path in checkpoints.glob(f"{WRITING}*"))])


def run_with_kills(recipe: Recipe, kills: list[Kill], directory: Path) -> str:
    """The same command until it finishes, killed on the way; returns what happened, for messages."""
    file = write_recipe(recipe, directory / "recipe.yaml")
    checkpoints = Path(recipe.output) / "checkpoints"
    story = []
    for number, kill in enumerate(kills):
        with started(file, directory / f"start-{number}.log") as job:
            left = carry_out(kill, job, checkpoints)
            story.append(f"{kill} after {job.steps()} steps, left: {left or 'nothing'}")
    with started(file, directory / "last.log") as job:
        code = job.process.wait(timeout=240)
        assert code == 0, "\n".join([*story, job.log.read_text()])
        assert "resuming after step" in job.log.read_text(), "\n".join(story)
    assert not list(checkpoints.glob(f"{WRITING}*"))
    return "\n".join(story)


def killable(tiny: Path, output: Path, device_type: str, steps: int, ranks: int = 1) -> Recipe:
    """Many checkpoints, and dropout: every generator counts."""
    return tiny_recipe(
        tiny,
        output,
        device_type,
        device={"ranks": ranks},
        model={"lora": {"rank": 4, "dropout": 0.1}},
        data={"validation": str(tiny / "validation.jsonl")},
        trainer={"steps": steps, "save_every": 2, "validate_every": 20},
        observe={"loggers": ["console"]},
    )


@pytest.mark.parametrize(("on", "count"), [pytest.param("cpu", 3, marks=pytest.mark.slow), ("npu", 1)])
def test_a_killed_run_has_the_metrics_of_one_that_was_not(
    tiny: Path, tmp_path: Path, on: str, count: int, one_thread: None
) -> None:
    kills = plan(seed=count, count=count, victims=("all",))
    launch(killable(tiny, tmp_path / "whole", on, steps=50), "")
    story = run_with_kills(killable(tiny, tmp_path / "killed", on, steps=50), kills, tmp_path)
    assert stable_metrics(tmp_path / "killed") == stable_metrics(tmp_path / "whole"), story


def test_killing_the_launcher_ends_the_ranks(tiny: Path, tmp_path: Path) -> None:
    """A rank that goes on alone would write into a run that is being resumed."""
    file = write_recipe(killable(tiny, tmp_path / "run", "cpu", steps=500, ranks=2), tmp_path / "recipe.yaml")
    with started(file, tmp_path / "log") as job:
        job.wait_for_steps(1)
        assert len(set(job.ranks())) == 2 and job.process.pid not in job.ranks()
        job.kill("launcher")


@pytest.mark.slow
def test_killing_the_launcher_while_the_ranks_start_ends_them(tiny: Path, tmp_path: Path) -> None:
    file = write_recipe(killable(tiny, tmp_path / "run", "cpu", steps=500, ranks=2), tmp_path / "recipe.yaml")
    with started(file, tmp_path / "log") as job:
        while len(job.ranks()) < 2:
            assert job.process.poll() is None, job.log.read_text()
            time.sleep(0.02)
        job.kill("launcher")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [7])
def test_many_kills_of_two_ranks(tiny: Path, tmp_path: Path, seed: int) -> None:
    """Of the whole job, of its launcher, of one rank: it ends within seconds and goes on exactly."""
    whole, killed = (killable(tiny, tmp_path / name, "cpu", 200, ranks=2) for name in ("whole", "killed"))
    with started(write_recipe(whole, tmp_path / "whole.yaml"), tmp_path / "whole.log") as job:
        assert job.process.wait(timeout=240) == 0, job.log.read_text()
    kills = plan(seed, count=24, victims=("all", "launcher", "0", "1"))
    story = run_with_kills(killed, kills, tmp_path)
    assert stable_metrics(tmp_path / "killed") == stable_metrics(tmp_path / "whole"), story
