"""The scheduled workflows: steps are run as a runner runs them, with stand-ins for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

WORKFLOW: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[1] / ".github" / "workflows" / "engines.yml").read_text()
)
REPORT = "### vllm 9.9 (newest)\n\n- `LLM.sleep` is not there\n"


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


class Runner:
    def __init__(self, workspace: Path, code: int, open_issue: str) -> None:
        self.workspace, self.outputs = workspace, dict[str, str]()
        report = workspace / "report"
        report.write_text(REPORT)
        program(workspace / ".venv" / "bin" / "python", f'echo "$1" > called; cat {report}; exit {code}')
        program(
            workspace / "bin" / "gh", f'echo "$@" >> gh-log; [ "$2" = list ] && echo "{open_issue}"; exit 0'
        )

    def run(self) -> int:
        (job,) = WORKFLOW["jobs"].values()
        for step in job["steps"]:
            if "uses" in step or step["run"] == ".ci/setup":
                continue
            condition = step.get("if", "")
            if condition:
                name, _, value = condition.removeprefix("steps.names.outputs.").partition(" == ")
                if self.outputs[name] != value.strip("'"):
                    continue
            output = self.workspace / "output"
            output.write_text("")
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=self.workspace,
                env={
                    "PATH": f"{self.workspace / 'bin'}{os.pathsep}{os.environ['PATH']}",
                    "GITHUB_OUTPUT": str(output),
                    "GITHUB_STEP_SUMMARY": str(self.workspace / "summary"),
                },
                timeout=60,
            )
            self.outputs |= dict(line.split("=", 1) for line in output.read_text().splitlines())
            if done.returncode:
                return done.returncode
        return 0

    @property
    def asked(self) -> str:
        log = self.workspace / "gh-log"
        return log.read_text() if log.exists() else ""


@pytest.mark.parametrize(
    ("code", "open_issue", "ends", "asked"),
    [
        (0, "", 0, []),
        (1, "", 0, ["issue list", "issue create"]),
        (1, "17", 0, ["issue list", "issue comment 17"]),
        (2, "", 1, []),
    ],
)
def test_what_has_moved_opens_one_issue(
    tmp_path: Path, code: int, open_issue: str, ends: int, asked: list[str]
) -> None:
    runner = Runner(tmp_path, code, open_issue)
    assert runner.run() == ends
    assert [line[: len(start)] for line, start in zip(runner.asked.splitlines(), asked, strict=True)] == asked
    assert (tmp_path / "summary").read_text() == REPORT
    if asked:
        assert "--body-file moved.md" in runner.asked and (tmp_path / "moved.md").read_text() == REPORT


def test_the_workflow_calls_what_is_there() -> None:
    (job,) = WORKFLOW["jobs"].values()
    (step,) = (step for step in job["steps"] if step.get("id") == "names")
    script = step["run"].split(".venv/bin/python ")[1].split()[0]
    assert (Path(__file__).parents[1] / script).is_file()
    # PyYAML reads the key `on` as true.
    assert WORKFLOW[True]["schedule"] and WORKFLOW["permissions"]["issues"] == "write"


NIGHTLY: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[1] / ".github" / "workflows" / "nightly.yml").read_text()
)


def test_the_nightly_workflow_runs_every_slow_test_but_the_benchmarks() -> None:
    """A new folder of tests with slow ones belongs to one of the parts."""
    tests = Path(__file__).parent
    parts = [word for part in NIGHTLY["jobs"]["slow"]["strategy"]["matrix"]["part"] for word in part.split()]
    folders = {path.relative_to(tests.parent).parts[1] for path in tests.glob("*/**/test_*.py")}
    slow = {
        name for name in folders if any("mark.slow" in p.read_text() for p in (tests / name).rglob("*.py"))
    }
    assert slow <= {word.removeprefix("tests/") for word in parts}, sorted(slow)
    assert "tests/test_*.py" in parts and NIGHTLY["permissions"] == {"contents": "read"}
    assert all(
        (tests.parent / word).is_dir() for word in parts if word.startswith("tests/") and "." not in word
    )


def benchmark_lines(workspace: Path, ratio: float) -> None:
    lines = [
        {"name": "startup", "ratio": ratio, "goal": 2.0},
        {"name": "cannot tell", "ratio": 1.0, "goal": None},
    ]
    (workspace / "lines.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_benchmarks_of_each_night_are_added_to_their_history_and_drawn(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / ".ci" / "history.py"
    for commit, ratio in (("a" * 40, 1.0), ("b" * 40, 1.5), ("b" * 40, 3.0)):
        benchmark_lines(tmp_path, ratio)
        command = [
            sys.executable,
            str(script),
            "lines.jsonl",
            "ratios.jsonl",
            "--commit",
            commit,
            "--plot",
            "ratios.png",
        ]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    rows = [json.loads(line) for line in (tmp_path / "ratios.jsonl").read_text().splitlines()]
    assert [(row["commit"][0], row["shares"]) for row in rows] == [
        ("a", {"startup": 0.5}),
        ("b", {"startup": 1.5}),
    ]
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_the_nightly_benchmarks_are_there() -> None:
    (step,) = (step for step in NIGHTLY["jobs"]["benchmarks"]["steps"] if "history.py" in step.get("run", ""))
    names = step["run"].split("for name in ")[1].split(";")[0].split()
    assert names and all(
        (Path(__file__).parents[1] / "benchmarks" / f"{name}.py").is_file() for name in names
    )
