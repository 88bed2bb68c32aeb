"""torch_npu 2.13.0 as it is published, on a machine without CANN."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from contract.wheels import Unavailable, fits_this_python, unzipped

from support import command, tiny_recipe, write_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Of a process that has the wheel on its path, as if it were installed."""
    try:
        wheel = unzipped("2.13.0")
    except Unavailable as missing:
        pytest.skip(str(missing))
    if not fits_this_python(wheel):
        pytest.skip("no wheel of torch_npu 2.13.0 for this Python")
    hidden = ("PYTHONPATH", "NPU_SIM", "ASCEND", "TORCH_DEVICE")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return {**clean, "PYTHONPATH": str(wheel), "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), env=environment, capture_output=True, text=True, timeout=300)


def test_the_doctor_explains_a_plugin_without_cann(environment: dict[str, str]) -> None:
    done = run(environment, "doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["device"] == "npu"
    errors = [finding["id"] for finding in report["findings"] if finding["level"] == "error"]
    assert errors == ["npu-plugin-without-toolkit"]
    assert "Failed to load the backend extension: torch_npu" in report["facts"]["torch_import"]
    assert report["nearest"]["commands"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_cpu_trains_beside_a_plugin_without_cann(
    environment: dict[str, str], tiny: Path, tmp_path: Path, ranks: int
) -> None:
    device = {"ranks": ranks, "type": "cpu"}
    recipe = tiny_recipe(tiny, tmp_path / "run", "cpu", device=device, trainer={"steps": 2})
    done = run(environment, "train", str(write_recipe(recipe, tmp_path / "recipe.yaml")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_refuses_a_device_whose_plugin_cannot_load(
    environment: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tiny, tmp_path / "run", "npu", trainer={"steps": 2})
    done = run(environment, "train", str(write_recipe(recipe, tmp_path / "recipe.yaml")))
    assert done.returncode == 1
    assert (
        "without a CANN toolkit" in done.stderr
        and "set_env.sh" in done.stderr
        and "Traceback" not in done.stderr
    )
