"""docs/npu-vs-gpu.md shows what the commands print of two real logs of verl, and how long logs must be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import parity_length
import pytest
from parity_calibration import Noise
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.tools.imports.convert import convert
from side_by_side import DOCS, blocks

PAGE = (DOCS / "npu-vs-gpu.md").read_text(encoding="utf-8")
LOGS = ("gpg-qwen2-7b-fsdp.log", "gpg-qwen2-7b-megatron.log")


@pytest.fixture(scope="module")
def logs(shared_data: Path) -> list[Path]:
    found = [shared_data / "verl-logs" / name for name in LOGS]
    if not all(path.is_file() for path in found):
        pytest.skip("no logs of verl in the shared data")
    return found


def test_the_configurations_differ_as_shown(logs: list[Path]) -> None:
    here, there = (convert(log.read_bytes(), "verl").recipe.splitlines() for log in logs)
    lines = blocks(PAGE, "text")[0].splitlines()
    assert len(lines) == 4
    for line in lines:
        own, other = (here, there) if line[0] == "<" else (there, here)
        assert line[2:] in own and line[2:] not in other


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_report_says_what_is_shown(
    logs: list[Path], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    page = PAGE if language == "en" else (DOCS / "zh/npu-vs-gpu.md").read_text(encoding="utf-8")
    done = CliRunner().invoke(app, ["--lang", language, "parity", "compare", *map(str, logs)])
    assert done.exit_code == 1, done.output
    printed = done.stdout.splitlines()
    shown = [line for block in blocks(page, "text")[1:3] for line in block.splitlines()]
    assert len(shown) == 7
    assert [line for line in shown if line not in printed] == []


def test_how_many_steps_are_enough() -> None:
    random = np.random.default_rng(0)
    noise = Noise("gaussian", 0.5)
    for steps, shift, expected in ((200, 0.0, "equivalent"), (200, 0.1, "different")):
        found = [parity_length.verdict(0.02, noise, steps, shift, random) for _ in range(10)]
        assert found.count(expected) >= 8
    short = [parity_length.verdict(0.04, Noise("gaussian", 0.8), 50, 0.1, random) for _ in range(10)]
    assert short.count("inconclusive") >= 8
