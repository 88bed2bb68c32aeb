"""Levels of determinism: what is set, what stays, what is said."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from isotrain.device.detect import DEVICES
from isotrain.device.determinism import make_deterministic, profile

NPU = {"CLOSE_MATMUL_K_SHIFT": "1", "ATB_MATMUL_SHUFFLE_K_ENABLE": "0", "INF_NAN_MODE_ENABLE": "1"}
EXPECTED = {
    "cpu": {},
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    "npu": {"HCCL_DETERMINISTIC": "true", **NPU},
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.mark.parametrize("name", DEVICES)
def test_levels_set_the_variables_of_the_device(name: str) -> None:
    for level in ("on", "strict"):
        found = profile(DEVICES[name], level, {}, starts=True)
        assert found.variables == {"PYTHONHASHSEED": "0", **EXPECTED[name]} and not found.complaints
    assert set(EXPECTED[name]) <= set(DEVICES[name].numerics_variables), "what changes results is recorded"
    assert profile(DEVICES[name], "off", {"PYTHONHASHSEED": "random"}).variables == {}


def test_vector_cores_have_collectives_of_their_own() -> None:
    found = profile(DEVICES["npu"], "on", {"HCCL_OP_EXPANSION_MODE": "AIV"}, starts=True).variables
    assert found == {"PYTHONHASHSEED": "0", "LCCL_DETERMINISTIC": "1", "ATB_LLM_LCOC_ENABLE": "0", **NPU}


def test_what_the_user_set_stays_and_is_told() -> None:
    found = profile(DEVICES["npu"], "on", {"HCCL_DETERMINISTIC": "false", "PYTHONHASHSEED": "7"})
    assert found.variables["HCCL_DETERMINISTIC"] == "false" and found.variables["PYTHONHASHSEED"] == "7"
    assert found.complaints == (
        "HCCL_DETERMINISTIC stays 'false' as you set it; 'true' would make results repeatable",
    )
    assert found.as_json()["not_set"] == list(found.complaints)


def test_random_hashes_are_not_repeatable() -> None:
    found = profile(DEVICES["cpu"], "on", {"PYTHONHASHSEED": "random"}, starts=True)
    assert found.variables == {} and len(found.complaints) == 1


@pytest.mark.heavy
@pytest.mark.parametrize(("seed", "complaints"), [("random", 1), ("0", 0)])
def test_hashes_are_fixed_before_python_starts(seed: str, complaints: int) -> None:
    code = (
        "from isotrain.device.detect import DEVICES; from isotrain.device.determinism import profile;"
        "print(len(profile(DEVICES['cpu'], 'on', {}).complaints))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": seed, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout.strip() == str(complaints), run.stderr


def test_levels_switch_operators_without_repeatable_kernels() -> None:
    make_deterministic("off")
    assert not torch.are_deterministic_algorithms_enabled()
    make_deterministic("on")
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    make_deterministic("strict")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
