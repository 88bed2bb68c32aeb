"""Every injected fault of a device, driver or engine is found by the stage that is named for it."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path

import npusim
import pytest

import mutations
from isotrain.tools.doctor.self_test.run import SelfTest, marked
from isotrain.tools.doctor.self_test.stages import DEVICES, PARTS
from isotrain.tools.doctor.self_test.verdicts import Engine, SelfTestSetting, StageVerdict

pytestmark = [pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Fault:
    name: str
    stage: str
    """The one that must fail first."""
    words: str
    """In the verdict."""
    device: str = "npu"
    engine: Engine = "hf"
    timeout: float = 300.0
    also: tuple[str, ...] = ()
    """Others that the same fault breaks."""


FAULTS = (
    Fault("device-in-use", "devices", "GB are in use; choose idle devices with ASCEND_RT_VISIBLE_DEVICES"),
    Fault("wrong-sum", "collectives", "all_reduce of 8 x bfloat16: 1 of 8 results are wrong on rank"),
    Fault("hanging-gather", "collectives", "during: all_gather of 8 x float32", timeout=100.0),
    Fault("attention-sees-neighbours", "attention", "float32 output, layer 0: error is"),
    Fault("attention-gradient", "attention-backward", "float32 gradient of key, layer 0: error is"),
    Fault("device-is-off", "sft", "relative difference of losses is", also=("fused",)),
    Fault("not-repeatable", "repeatable", "at most 0 is allowed", device="cpu"),
    Fault("engine-crashes", "engine-start", "killed by SIGSEGV"),
    Fault("other-temperature", "generation", "difference of sampled log-probs before any update is"),
    Fault("not-a-number", "generation", "log-probs before any update is nan"),
    Fault("update-not-taken", "weight-update", "log-probs after update 1 is"),
    Fault("digest-ignored", "weight-update", "took a weight update whose digest is wrong"),
    Fault("sleepless", "sleep", "bytes that a sleeping engine frees is 0"),
    Fault("stale-graphs", "graphs", "log-probs after update 1 is", device="cpu", engine="vllm"),
    Fault("full-disk", "colocated-save", "No space left on device", also=("weight-route",)),
    Fault(
        "no-shared-memory",
        "weight-route",
        "weights of grpo went by file in place of ipc: warning: weights go through host memory",
        timeout=600.0,
    ),
    Fault("process-left", "memory-returned", "(sleep)"),
)
QUICK = {"attention-sees-neighbours"}


def verdicts(fault: Fault, work: Path) -> dict[str, StageVerdict]:
    """Of the stage that the fault is about, and those of the parts before it that it needs."""
    wanted = {fault.stage} | ({"engine-start"} if fault.stage == "memory-returned" else set())
    parts = [DEVICES]
    for part in PARTS[1:]:
        if wanted & set(part.stages):
            # What this part waits for is not run here.
            parts.append(replace(part, after="", timeout=fault.timeout))
    setting = SelfTestSetting(device=fault.device, engine=fault.engine, work=str(work))
    self_test = SelfTest(setting, parts=parts)
    found = {verdict.stage: verdict for verdict in self_test.run()}
    # Nothing of a failed self-test stays.
    assert marked(self_test.mark) == []
    return found


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=() if fault.name in QUICK else pytest.mark.slow)
        for fault in FAULTS
    ],
)
@pytest.mark.ranks
def test_a_fault_is_named(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    machine = tmp_path / "machine"
    machine.mkdir()
    simulated = npusim.environment(2, host=machine) if fault.device == "npu" else {}
    for name, value in {**simulated, **mutations.environment(fault.name)}.items():
        monkeypatch.setenv(name, value)
    paths = [str(mutations.SITE), *([str(npusim.SITE)] if fault.device == "npu" else [])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]))
    (tmp_path / "work").mkdir()
    # As under a launcher of jobs, for which the parts must not take themselves.
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = verdicts(fault, tmp_path / "work")
    print({name: (verdict.outcome, verdict.result) for name, verdict in found.items()})
    failed = [name for name, verdict in found.items() if verdict.outcome == "failed"]
    assert failed == [fault.stage, *fault.also]
    assert fault.words in found[fault.stage].result
