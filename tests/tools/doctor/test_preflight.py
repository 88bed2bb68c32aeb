"""Before a run: what cannot work is refused in the doctor's words, and what is broken is hidden."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isotrain.errors import DeviceError
from isotrain.recipe.library import locate
from isotrain.recipe.load import load_recipe
from isotrain.tools.doctor.examine import preflight as look
from isotrain.tools.doctor.system import RecordedMachine

pytestmark = pytest.mark.heavy

MACHINES = Path(__file__).parent / "machines"
RECIPE = "gsm8k-sft-lora"


def preflight(machine: str, *overrides: str) -> list[str]:
    return look(load_recipe(locate(RECIPE), overrides), RecordedMachine(MACHINES / machine))


@pytest.mark.parametrize("machine", ["good-a2", "good-a3", "good-cuda", "good-cpu", "vllm-ascend-0.23-a2"])
def test_good_machines_pass_without_a_warning(machine: str) -> None:
    for device in ("auto", machine.partition("-")[2] if machine in ("good-cuda", "good-cpu") else "npu"):
        assert preflight(machine, f"device.type={device}") == []


def test_refuses_with_the_words_of_the_doctor() -> None:
    with pytest.raises(
        DeviceError, match=r"not strictly ascending.*\n  -> export ASCEND_RT_VISIBLE_DEVICES=0,1,2"
    ):
        preflight("mask-out-of-order", "device.type=npu")
    with pytest.raises(DeviceError, match="torch_npu is installed without a CANN"):
        preflight("plugin-without-cann", "device.type=npu")


def test_another_device_is_not_refused() -> None:
    (warning,) = preflight("plugin-without-cann", "device.type=cpu")
    assert "isotrain's own commands avoid it" in warning
    assert preflight("mask-out-of-order", "device.type=cpu") == []


def test_auto_may_take_another_device() -> None:
    (warning,) = preflight("plugin-without-cann", "device.type=auto")
    assert "without a CANN toolkit" in warning


def test_a_replay_needs_no_engine() -> None:
    machine = RecordedMachine(MACHINES / "engine-mismatch")
    with pytest.raises(DeviceError, match=r"was published with vllm 0\.23\.0"):
        look(load_recipe(locate("tiny-grpo"), ["device.type=npu"]), machine)
    (warning,) = look(load_recipe(locate("tiny-grpo"), ["device.type=npu", "rollout.replay=a"]), machine)
    assert "was published with vllm 0.23.0" in warning


def test_finds_a_toolkit_without_its_version_file(tmp_path: Path) -> None:
    described = {
        "machine": "aarch64",
        "python": "3.11.9",
        "packages": {"torch": "2.10.0", "torch-npu": "2.10.0", "transformers": "5.19.0", "peft": "0.21.2"},
        "variables": {"LD_LIBRARY_PATH": "/opt/ascend/lib64"},
        "found": ["/opt/ascend/lib64/libhccl.so"],
    }
    (tmp_path / "machine.json").write_text(json.dumps(described))
    recipe = load_recipe(locate(RECIPE), ["device.type=npu"])
    assert look(recipe, RecordedMachine(tmp_path)) == []


def test_a_plugin_without_its_libraries_is_hidden(tmp_path: Path) -> None:
    """As broken as the real one without CANN: torch, transformers and child processes go on without it."""
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    information = tmp_path / "torch_npu-2.13.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (information / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "ASCEND"))
    }
    environment["PYTHONPATH"] = str(tmp_path)
    child = (
        "import isotrain, importlib.util, torch, transformers;"
        "assert importlib.util.find_spec('torch_npu') is None;"
        "assert not transformers.utils.is_torch_npu_available()"
    )
    program = (
        "import subprocess, sys;"
        "from isotrain.tools.doctor.plugin import hide_a_plugin_that_cannot_load;"
        "hide_a_plugin_that_cannot_load();"
        "import torch;"
        f"sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    bare = subprocess.run(
        [sys.executable, "-c", "import torch"], env=environment, capture_output=True, timeout=120
    )
    assert bare.returncode != 0, "otherwise this test shows nothing"
