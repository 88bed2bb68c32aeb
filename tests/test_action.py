"""action.yml, the GitHub Action that compares two logs: its steps are run as a runner runs them."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_samples import verl_line

REPOSITORY = Path(__file__).parents[1]
ACTION: dict[str, Any] = yaml.safe_load((REPOSITORY / "action.yml").read_text())


class Runner:
    """The steps of the action with `run`, one after the other; the artifact's upload is left out."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.outputs: dict[str, str] = {}
        self.summary = workspace / "summary"
        self.printed = ""

    def run(self, **given: str) -> int:
        defaults = {name: str(one.get("default", "")) for name, one in ACTION["inputs"].items()}
        assert given.keys() <= defaults.keys()
        inputs = {**defaults, "python": sys.executable, **given}
        for step in ACTION["runs"]["steps"]:
            if "run" not in step or step["name"] == "Install":
                continue
            output = self.workspace / "output"
            output.write_text("")
            variables = {name: self._filled(text, inputs) for name, text in step["env"].items()}
            done = subprocess.run(
                # As a runner calls `shell: bash`.
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=self.workspace,
                env={
                    **os.environ,
                    "GITHUB_OUTPUT": str(output),
                    "GITHUB_STEP_SUMMARY": str(self.summary),
                    **variables,
                },
                capture_output=True,
                text=True,
                timeout=120,
            )
            self.printed += done.stdout + done.stderr
            self.outputs |= dict(line.split("=", 1) for line in output.read_text().splitlines())
            if done.returncode:
                return done.returncode
        return 0

    def _filled(self, text: str, inputs: dict[str, str]) -> str:
        known = {f"inputs.{name}": value for name, value in inputs.items()}
        known |= {f"steps.compare.outputs.{name}": value for name, value in self.outputs.items()}
        return re.sub(r"\$\{\{ (.*?) \}\}", lambda match: known.get(match[1], ""), text)


def noisy(path: Path, seed: int, factor: float = 1.0) -> Path:
    """A rerun: another draw of the noise around the same course."""
    log(path, factor)
    draw = random.Random(seed)

    def moved(match: re.Match[str]) -> str:
        return f"{match[1]}{float(match[2]) + draw.gauss(0, 0.005)!r}"

    path.write_text(re.sub(r"(critic/rewards/mean:)(\S+)", moved, path.read_text()))
    return path


def baseline(runs: list[Path], out: Path) -> None:
    command = [sys.executable, "-m", "isotrain", "parity", "baseline", *map(str, runs), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def log(path: Path, factor: float = 1.0) -> None:
    lines = [
        verl_line(step).replace("-0.0182796623557806", repr(factor * (1 - 1 / (step + 1))))
        for step in range(1, 41)
    ]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    log(tmp_path / "a.log")
    return Runner(tmp_path)


def test_equal_logs_pass(runner: Runner) -> None:
    log(runner.workspace / "b b.log")
    assert runner.run(reference="a.log", candidate="b b.log", margins="reward=0.01\nloss=0.01\n") == 0, (
        runner.printed
    )
    assert runner.outputs["exit-code"] == "0" and runner.outputs["outcome"] == "equivalent"
    told = runner.summary.read_text()
    assert "Outcome: equivalent." in told and "结果：等价" in told
    assert "| critic/rewards/mean | whole run |" in told and "| 0.01 |" in told
    verdict = json.loads((runner.workspace / "parity-report" / "verdict.json").read_text())
    assert verdict["outcome"]["verdict"] == "equivalent"


def test_another_reward_fails_and_is_named(runner: Runner) -> None:
    log(runner.workspace / "b.log", factor=0.5)
    assert runner.run(reference="a.log", candidate="b.log") == 1
    assert runner.outputs["outcome"] == "different"
    assert "critic/rewards/mean is 0." in runner.summary.read_text()


def test_inconclusive_fails_unless_it_may_pass(runner: Runner) -> None:
    lines = (runner.workspace / "a.log").read_text().splitlines()
    (runner.workspace / "b.log").write_text("\n".join(lines[:20]) + "\n")
    assert runner.run(reference="a.log", candidate="b.log") == 3
    assert runner.outputs["outcome"] == "inconclusive"
    assert runner.run(reference="a.log", candidate="b.log", report="again", inconclusive="pass") == 0


def test_what_cannot_be_read_never_passes(runner: Runner) -> None:
    """Not with an inconclusive answer allowed, nor with the report of an earlier comparison there."""
    log(runner.workspace / "b.log")
    assert runner.run(reference="a.log", candidate="b.log") == 0
    runner.outputs.clear()
    (runner.workspace / "b.log").write_text("")
    assert runner.run(reference="a.log", candidate="b.log", inconclusive="pass") != 0
    assert "exists already" in runner.printed
    runner.outputs.clear()
    assert runner.run(reference="a.log", candidate="b.log", report="new", inconclusive="pass") == 2
    assert "outcome" not in runner.outputs and "the file is empty" in runner.printed


def test_inputs_are_data(runner: Runner) -> None:
    """No input is text of a script, and none is taken for an option."""
    scripts = [step["run"] for step in ACTION["runs"]["steps"] if "run" in step]
    assert not any("${{" in script for script in scripts)
    assert runner.run(reference="$(touch hacked)`touch hacked`", candidate="--help") != 0
    assert not (runner.workspace / "hacked").exists() and "Usage" not in runner.printed


def test_a_baseline_is_the_reference_of_nightly_jobs(runner: Runner) -> None:
    folder = runner.workspace
    runs = [noisy(folder / f"{seed}.log", seed) for seed in range(6)]
    baseline(runs, folder / "baseline.json")
    for path in runs:
        path.unlink()
    noisy(folder / "night.log", 10)
    assert runner.run(reference="baseline.json", candidate="night.log") == 0, runner.printed
    assert runner.outputs["outcome"] == "equivalent" and runner.outputs["computation"] == "inconclusive"
    noisy(folder / "worse.log", 11, factor=0.8)
    assert runner.run(reference="baseline.json", candidate="worse.log", report="worse") == 1
    assert (
        "critic/rewards/mean is 0." in runner.summary.read_text()
        and "结果：不同" in runner.summary.read_text()
    )
    (folder / "baseline.json").write_text(
        (folder / "baseline.json").read_text().replace('"nights": 365', '"nights": 9')
    )
    runner.outputs.clear()
    hostile = {"reference": "baseline.json", "candidate": "night.log", "inconclusive": "pass"}
    assert (
        runner.run(**hostile, report="hostile") == 2 and "its digest is of another content" in runner.printed
    )


def test_a_baseline_of_a_real_log_names_the_other_recipe(runner: Runner, shared_data: Path) -> None:
    """Draws of noise around a real log of verl; then the real log of another backend, data and length."""
    folder = shared_data / "verl-logs"
    if not folder.is_dir():
        pytest.skip(f"no logs of verl at {folder}")
    text, runs = (folder / "gpg-qwen2-7b-fsdp.log").read_text(), []
    for seed in range(4):
        draw = random.Random(seed)
        moved = re.sub(
            r"(critic/(?:rewards|score)/mean:)([-0-9.e]+)",
            lambda match, draw=draw: f"{match[1]}{float(match[2]) + draw.gauss(0, 0.005):.4f}",  # type: ignore[misc]
            text,
        )
        runs.append(runner.workspace / f"{seed}.log")
        runs[-1].write_text(moved)
    baseline(runs[:3], runner.workspace / "baseline.json")
    assert runner.run(reference="baseline.json", candidate=str(runs[3])) == 0, runner.printed
    other = str(folder / "gpg-qwen2-7b-megatron.log")
    assert runner.run(reference="baseline.json", candidate=other, report="other") in (1, 3)
    told = runner.summary.read_text()
    assert "the printed configurations differ: data.train" in told and "ended at step 105 of 210" in told


def test_the_two_real_logs_are_different(runner: Runner, shared_data: Path) -> None:
    folder = shared_data / "verl-logs"
    if not folder.is_dir():
        pytest.skip(f"no logs of verl at {folder}")
    names = {"reference": "gpg-qwen2-7b-fsdp.log", "candidate": "gpg-qwen2-7b-megatron.log"}
    paths = {role: str(folder / name) for role, name in names.items()}
    assert runner.run(**paths, require="computation") == 1
    assert "the printed configurations differ: data.train" in runner.summary.read_text()
