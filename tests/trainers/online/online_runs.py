"""Online runs for tests, started as a user starts them: a real Ray, real engines, the tiny task."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import npusim
import psutil

from isotrain.data.record import read_trajectories
from isotrain.recipe.schema import Recipe
from support import command, tiny_recipe, write_recipe


def online_recipe(tiny: Path, output: Path, device_type: str = "cpu", **sections: dict[str, Any]) -> Recipe:
    """A short run of the reference engine; `sections` are merged over it."""
    base: dict[str, dict[str, Any]] = {
        "data": {
            "train": str(tiny / "prompts.jsonl"),
            "batch_size": 4,
            "max_length": 64,
            "tokens_per_micro_batch": 512,
        },
        "algorithm": {"name": "grpo"},
        "rollout": {"engine": "hf", "n": 4, "max_tokens": 6},
        "reward": {"function": {"path": f"{tiny / 'reward.py'}:score"}, "answer_key": "answer"},
        "cluster": {"address": "local"},
        "optimizer": {"lr": 5e-3, "betas": [0.9, 0.95], "schedule": "constant", "warmup_ratio": 0.0},
        "trainer": {"steps": 4},
        "observe": {"loggers": ["console"]},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return tiny_recipe(tiny, output, device_type, **base)


def environment(device_type: str = "cpu") -> dict[str, str]:
    """Of the process that a user would start: it knows the simulated device only where that is asked for."""
    if device_type != "cpu":
        return {**npusim.environment(), "OMP_NUM_THREADS": "1"}
    hidden = ("PYTHONPATH", "OMP_NUM_THREADS")
    clean = {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("NPU_SIM")}
    return {**clean, "HF_HUB_OFFLINE": "1"}


class OnlineRun:
    """One start of `isotrain train`, in a session of its own so that everything of it can be found."""

    def __init__(self, recipe: Recipe, work: Path, name: str = "run", **variables: str) -> None:
        self.recipe = recipe
        self.log = work / f"{name}.log"
        path = write_recipe(recipe, work / f"{name}.yaml")
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command("train", str(path)),
                env=environment(recipe.device.type) | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def steps(self) -> int:
        return sum(line.startswith("step ") for line in self.text.splitlines())

    def wait_for_steps(self, count: int, timeout: float = 540) -> None:
        deadline = time.monotonic() + timeout
        while self.steps() < count:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def trained(self) -> int:
        """Steps in the metrics; long runs print a line from time to time only."""
        file = Path(self.recipe.output) / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def wait_for_trained(self, count: int, timeout: float = 600) -> None:
        deadline = time.monotonic() + timeout
        while self.trained() < count:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def wait(self, timeout: float = 540) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {timeout} s:\n{self.text}") from None
        finally:
            self.end()

    def finish(self, timeout: float = 540) -> Path:
        """Wait for a good end; returns the run directory."""
        assert self.wait(timeout) == 0, self.text
        return Path(self.recipe.output)

    def workers(self, kind: str) -> list[int]:
        """Process ids of the run's workers of one class, such as `PolicyRank`."""
        return workers_below(self.process.pid, kind)

    def end(self) -> None:
        """Whatever is left of the run; Ray's processes follow their driver."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def workers_below(root: int, kind: str) -> list[int]:
    """Process ids of workers of one class below a process, which has started their cluster."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{kind}"):
                found.append(process.pid)
    return found


def run_online(recipe: Recipe, work: Path, name: str = "run", timeout: float = 540) -> Path:
    return OnlineRun(recipe, work, name).finish(timeout)


def resumed(recipe: Recipe, work: Path, name: str, after: int, timeout: float = 600) -> Path:
    """A run that is killed after so many steps and started again."""
    first = OnlineRun(recipe, work, f"{name}-killed")
    first.wait_for_steps(after, timeout)
    os.kill(first.process.pid, signal.SIGKILL)
    first.wait()
    second = OnlineRun(recipe, work, f"{name}-resumed")
    run = second.finish(timeout)
    assert "resuming after step" in second.text, second.text
    return run


def drawn(run: Path) -> list[list[tuple[int, int, int]]]:
    """Of each step the responses that were learnt from, as their draw, prompt and number, in order."""
    steps: dict[str, list[tuple[int, int, int]]] = {}
    for file in sorted((run / "trajectories").glob("step-*.parquet")):
        learnt = steps.setdefault(file.name[: len("step-000000")], [])
        learnt += [(t.prompt_index, t.row, t.sample) for t, _, _ in read_trajectories(file)]
    return [sorted(learnt) for learnt in steps.values()]
