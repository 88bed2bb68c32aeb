from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy
import pytest

from isotrain.observe.environment import _commit, _cpu, describe_environment, differences, numerics


def test_it_says_what_the_numbers_depend_on() -> None:
    described = describe_environment({"type": "cpu", "count": 1}, [])
    assert described["device"] == {"type": "cpu", "count": 1}
    assert isinstance(described["packages"], dict)
    assert described["packages"]["numpy"] == numpy.__version__
    assert "pytest" not in described["packages"]
    assert isinstance(described["cpu"], dict) and described["cpu"]["count"] == os.cpu_count()
    json.dumps(described)


def test_variables_are_the_asked_and_the_numerical_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    home = os.path.expanduser("~")
    for name, value in {
        "OMP_NUM_THREADS": "3",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "PYTHONHASHSEED": "0",
        "TORCH_SOMETHING": "1",
        "TORCH_HOME": f"{home}/cache",
        "DEVICE_OWN": f"{home}/kernels",
        "UNRELATED": "x",
    }.items():
        monkeypatch.setenv(name, value)
    variables = describe_environment({}, ["DEVICE_OWN", "NOT_SET"])["variables"]
    assert isinstance(variables, dict)
    expected = {
        "OMP_NUM_THREADS": "3",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "PYTHONHASHSEED": "0",
        "TORCH_SOMETHING": "1",
        "DEVICE_OWN": "~/kernels",
    }
    assert expected.items() <= variables.items()
    assert not {"TORCH_HOME", "UNRELATED", "NOT_SET", "HOME", "USER", "PATH"} & variables.keys()


def test_secrets_are_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "TORCH_SECRET",
        "OMP_PASSWORD",
        "MKL_license_key",
        "VLLM_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "MY_PASSWD",
    ]
    for name in names:
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hunter2@proxy:1")
    command = [
        "isotrain",
        "train",
        "--token",
        "hunter2",
        "--api-key=hunter2",
        "logger.password=hunter2",
        "data.train=https://me:hunter2@host/x",
    ]
    described = describe_environment({}, [*names, "HTTPS_PROXY"], command=command)
    assert "hunter2" not in json.dumps(described)
    assert isinstance(described["variables"], dict) and not set(names) & described["variables"].keys()


def test_settings_that_sound_like_secrets_stay_in_the_command() -> None:
    command = ["isotrain", "train", "r.yaml", "data.tokens_per_micro_batch=4096", "data.prompt_key=question"]
    assert describe_environment({}, [], command=command)["command"] == command


def test_cpu_model_on_either_architecture(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast One\nflags\t: fpu avx2 avx512_bf16 amx_tile avx\n\n")
    assert _cpu(info)["model"] == "Fast One"
    assert _cpu(info)["features"] == ["amx_tile", "avx", "avx2", "avx512_bf16"]
    info.write_text("Features\t: fp asimd sve bf16\nCPU implementer\t: 0x48\nCPU part\t: 0xd01\n")
    assert _cpu(info)["model"] == "implementer 0x48 part 0xd01"
    assert _cpu(info)["features"] == ["asimd", "bf16", "sve"]
    assert _cpu(tmp_path / "none")["features"] == []


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_of_a_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert _commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-q", "-m", "m")
    git("tag", "v1")
    assert _commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "f").write_text("2")
    assert _commit(tmp_path) == git("rev-parse", "HEAD") + "-dirty"
    (tmp_path / "inner").mkdir()
    assert _commit(tmp_path / "inner") is None


def test_what_is_passed_on_to_workers_changes_numbers_and_is_no_secret() -> None:
    set_here = {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "TORCH_TOKEN": "s",
        "TORCH_HOME": "/a",
        "HOME": "/b",
        "OWN": "/c",
    }
    assert numerics(set_here, ["OWN"]) == {"ONEDNN_MAX_CPU_ISA": "AVX2", "OWN": "/c"}


def test_ranks_that_differ_are_told_once_for_each_difference() -> None:
    base = {"commit": "a", "python": "3.11", "machine": "x86_64", "cpu": {"model": "A", "usable": 2}}
    first = {**base, "packages": {"torch": "2.13"}, "variables": {"OMP_NUM_THREADS": "4", "HIDES": "0,1"}}
    same = {**first, "cpu": {"model": "A", "usable": 1}, "variables": {"OMP_NUM_THREADS": "4", "HIDES": "2"}}
    other = {**first, "packages": {"torch": "2.14"}, "variables": {"HIDES": "0"}}
    assert differences([first, same], {"HIDES"}) == []
    assert differences([first, same, other, other], {"HIDES"}) == [
        "packages.torch: rank 0 has 2.13, rank 2 has 2.14",
        "variables.OMP_NUM_THREADS: rank 0 has 4, rank 2 has None",
    ]
