"""The versions of Python that pyproject promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def written(pattern: str) -> str:
    """What pyproject says; read as text, since its parser is itself newer than the lowest version."""
    found = re.findall(pattern, (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(found) == 1
    return str(found[0])


def test_syntax_and_types_are_checked_for_the_lowest_version() -> None:
    lowest = written(r'^requires-python = ">=([\d.]+)"')
    assert written(r'^python_version = "([\d.]+)"') == lowest
    assert written(r'^target-version = "py(\d+)"') == lowest.replace(".", "")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_types_fit_the_newer_versions(version: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--python-version", version, "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
