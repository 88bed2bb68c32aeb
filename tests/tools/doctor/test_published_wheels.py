"""What the matrix and the vLLM adapter say of vllm-ascend, held against its wheels as they are published."""

from __future__ import annotations

from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from contract.engines import CALLS, MEMBERS, UNUSED, moved
from contract.engines import VERSIONS as VERSIONS_OF_ENGINES
from contract.wheels import NEWEST, NEWEST_OR_PRE, Unavailable, unzipped
from packaging.requirements import Requirement

from isotrain.tools.doctor.matrix import fits, matrix

pytestmark = pytest.mark.slow

# 0.7.3 and 0.8.5rc1 have no wheel for Python 3.10 or 3.11.
STACKS = {
    stack.packages["vllm-ascend"]: stack
    for stack in reversed(matrix().stacks)
    if "vllm-ascend" in stack.packages and stack.name.startswith("vllm-ascend")
}
VERSIONS = [version for version in STACKS if version not in ("0.7.3", "0.8.5rc1")]


def wheel(version: str) -> Path:
    try:
        return unzipped(version, "vllm_ascend")
    except Unavailable as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_matrix_is_what_the_wheel_asks_for(version: str) -> None:
    (information,) = wheel(version).glob("*.dist-info/METADATA")
    asked = {
        requirement.name.replace("_", "-"): requirement.specifier
        for requirement in map(
            Requirement, Parser().parsestr(information.read_text()).get_all("Requires-Dist", [])
        )
    }
    stack = STACKS[version]
    for name in ("torch", "torch-npu", "triton-ascend"):
        if name in stack.packages:
            assert asked[name].contains(stack.packages[name], prereleases=True), (name, asked[name])
    assert fits(version, stack.packages["vllm-ascend"])


def test_the_wheel_has_what_the_adapter_calls() -> None:
    package = wheel("0.23.0") / "vllm_ascend"
    worker = (package / "worker" / "worker.py").read_text()
    assert "class NPUWorker(WorkerBase)" in worker, "our method is added to its workers"
    assert "self.model_runner" in worker and "def get_model" in worker
    environment = (package / "envs.py").read_text()
    assert '"VLLM_ASCEND_ENABLE_NZ": lambda: int(os.getenv("VLLM_ASCEND_ENABLE_NZ", 1))' in environment
    waking = worker.partition("def wake_up")[2].partition("\n    def ")[0]
    assert "weight_nz_mode" in waking and "raise ValueError" in waking, "NZ has to be off where engines sleep"
    allocator = (package / "device_allocator" / "camem.py").read_text()
    assert '"expandable_segments:True" not in conf' in allocator
    assert not any("rl_config" in file.read_text() for file in package.rglob("*.py")), "then it is to be used"


@pytest.mark.parametrize(
    ("package", "version"),
    [
        (name, version)
        for name, versions in VERSIONS_OF_ENGINES.items()
        for version in versions
        if version not in (NEWEST, NEWEST_OR_PRE)
    ],
)
def test_engines_have_every_name_that_the_adapters_take(package: str, version: str) -> None:
    """The newest versions are for the weekly workflow: they must not fail a change that is not about them."""
    try:
        assert moved(package, version) == []
    except Unavailable as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize(
    ("table", "name", "problem"),
    [
        (CALLS, "vllm_ascend.sample.sampler.AscendSampler", "does not take `other`"),
        (MEMBERS, ("vllm_ascend/worker/worker.py", "NPUWorker"), "`NPUWorker` has no `other`"),
    ],
)
def test_a_name_that_has_moved_is_told(
    table: Any, name: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel("0.23.0")
    monkeypatch.setitem(table["vllm_ascend"], name, {"other"})
    (line,) = moved("vllm_ascend", "0.23.0")
    assert problem in line


def test_a_new_field_of_an_unused_request_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    request = ("sglang/srt/managers/io_struct.py", "InitWeightsUpdateGroupReqInput")
    known = UNUSED["sglang"][request]
    monkeypatch.setitem(UNUSED["sglang"], request, known - {"backend"})
    try:
        (line,) = moved("sglang", "0.5.18")
    except Unavailable as missing:
        pytest.skip(str(missing))
    assert "`InitWeightsUpdateGroupReqInput`, which is not used, has `backend`" in line


def test_parts_of_an_engine_wake_up_one_by_one() -> None:
    """Weights before the cache, so that ranks can hand theirs over before they leave the device."""
    package = wheel("0.23.0") / "vllm_ascend"
    allocator = (package / "device_allocator" / "camem.py").read_text()
    waking = allocator.partition("def wake_up")[2].partition("\n    def ")[0]
    assert "tags is None or data.tag in tags" in waking
    users = "".join(file.read_text() for file in (package / "worker").rglob("*.py"))
    assert '"weights"' in users and '"kv_cache"' in users, "the names that vLLM has for both"
