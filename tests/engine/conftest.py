"""The jobs of `jobs.py`, run once for all tests that look at their results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jobs
import npusim
import pytest

Outcome = Callable[[str, int], Path]


@pytest.fixture(scope="session")
def outcome(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The directory that the ranks of a job on a device wrote."""

    @cache
    def of(device_type: str, ranks: int) -> Path:
        out = tmp_path_factory.mktemp(f"jobs-{device_type}-{ranks}")
        if ranks == 1:
            jobs.run(device_type, tiny / "model", out)
        else:
            command = [sys.executable, jobs.__file__, device_type, str(tiny / "model"), str(out)]
            npusim.run_ranks(command, ranks, timeout=240)
        return out

    return of
