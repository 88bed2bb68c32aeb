"""Every injected fault of a device, driver or engine is found by the stage that is named for it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import npusim
import pytest

import mutations
from isotrain.children import make_held
from isotrain.tools.doctor.self_test.parts.devices import _shared_memory
from isotrain.tools.doctor.self_test.parts.runs import _check_cores
from isotrain.tools.doctor.self_test.run import SelfTest, marked
from isotrain.tools.doctor.self_test.stages import DEVICES, PARTS, STAGES
from isotrain.tools.doctor.self_test.verdicts import (
    Engine,
    SelfTestSetting,
    StageFailed,
    StageSkipped,
    StageVerdict,
)
from isotrain.weights.file import PREFIX

pytestmark = [pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Fault:
    name: str
    what: str
    """For docs/self-test.md."""
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
    Fault(
        "device-in-use",
        "another program holds half of the memory",
        "devices",
        "GB are in use; choose idle devices with ASCEND_RT_VISIBLE_DEVICES",
    ),
    Fault(
        "wrong-sum",
        "one element of a bfloat16 `all_reduce` is off by 1",
        "collectives",
        "all_reduce of 8 x bfloat16: 1 of 8 results are wrong on rank",
    ),
    Fault(
        "hanging-gather",
        "`all_gather` hangs on one rank",
        "collectives",
        "during: all_gather of 8 x float32",
        timeout=100.0,
    ),
    Fault(
        "attention-sees-neighbours",
        "packed samples see their neighbours",
        "attention",
        "float32 output, layer 0: error is",
    ),
    Fault(
        "attention-gradient",
        "the gradient of keys is 5 % too large",
        "attention-backward",
        "float32 gradient of key, layer 0: error is",
    ),
    Fault(
        "unstable-sort",
        "two rows of one expert change places in the device's sort",
        "experts",
        "order of rows of 296 rows:",
    ),
    Fault(
        "other-numbers",
        "a device's number in one process is taken for its number in another",
        "shared-memory",
        "cannot use memory of one that sees all 2: ",
    ),
    Fault(
        "name-kept",
        "a communicator that was aborted keeps its name",
        "communicator",
        "does not work after one that failed: the communicator",
    ),
    Fault(
        "device-is-off",
        "an activation function is 1 % off on the device",
        "sft",
        "relative difference of losses is",
        also=("fused",),
    ),
    Fault(
        "not-repeatable", "a kernel is not deterministic", "repeatable", "at most 0 is allowed", device="cpu"
    ),
    Fault("engine-crashes", "the engine crashes at its start", "engine-start", "killed by SIGSEGV"),
    Fault(
        "other-temperature",
        "log-probs of another temperature",
        "generation",
        "difference of sampled log-probs before any update is",
    ),
    Fault(
        "not-a-number", "log-probs that are not numbers", "generation", "log-probs before any update is nan"
    ),
    Fault(
        "update-not-taken",
        "an update is acknowledged and not taken",
        "weight-update",
        "log-probs after update 1 is",
    ),
    Fault(
        "digest-ignored",
        "a damaged update is taken",
        "weight-update",
        "took a weight update whose digest is wrong",
    ),
    Fault("sleepless", "sleep keeps the memory", "sleep", "bytes that a sleeping engine frees is 0"),
    Fault(
        "stale-graphs",
        "captured graphs keep the old weights (vLLM, CPU)",
        "graphs",
        "log-probs after update 1 is",
        device="cpu",
        engine="vllm",
    ),
    Fault(
        "full-disk",
        "the disk is full at a save",
        "colocated-save",
        "No space left on device",
        also=("weight-route",),
    ),
    Fault(
        "no-shared-memory",
        "the driver shares no memory between processes",
        "weight-route",
        "weights of grpo went by file in place of ipc: warning: weights go through host memory",
        timeout=600.0,
    ),
    Fault("process-left", "a process stays behind", "memory-returned", "(sleep)"),
)
QUICK = {"attention-sees-neighbours"}


@contextmanager
def environment(fault: Fault, work: Path) -> Iterator[None]:
    """Of the simulated machine with the fault; as under a launcher of jobs, for whose ranks the parts must
    not take themselves."""
    machine = work.parent / "machine"
    machine.mkdir()
    simulated = npusim.environment(2, host=machine) if fault.device == "npu" else {}
    paths = [str(mutations.SITE), *([str(npusim.SITE)] if fault.device == "npu" else [])]
    search = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    others = {"PYTHONPATH": search, "RANK": "0", "WORLD_SIZE": "2"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**simulated, **mutations.environment(fault.name), **others}.items():
            patch.setenv(name, value)
        yield


def verdicts(fault: Fault, work: Path) -> dict[str, StageVerdict]:
    """Of the stage that the fault is about, and those of the parts before it that it needs."""
    wanted = {fault.stage} | ({"engine-start"} if fault.stage == "memory-returned" else set())
    parts = [DEVICES]
    for part in PARTS[1:]:
        if wanted & set(part.stages):
            # What this part waits for is not run here.
            parts.append(replace(part, after="", timeout=fault.timeout))
    with environment(fault, work):
        self_test = SelfTest(
            SelfTestSetting(device=fault.device, engine=fault.engine, work=str(work)), parts=parts
        )
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
def test_a_fault_is_named(fault: Fault, tmp_path: Path) -> None:
    if fault.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    (tmp_path / "work").mkdir()
    found = verdicts(fault, tmp_path / "work")
    print({name: (verdict.outcome, verdict.result) for name, verdict in found.items()})
    failed = [name for name, verdict in found.items() if verdict.outcome == "failed"]
    assert failed == [fault.stage, *fault.also]
    assert fault.words in found[fault.stage].result


@pytest.mark.parametrize("killed", [False, True])
def test_weights_of_another_program_are_not_left_behind(killed: bool) -> None:
    """It runs beside the self-test; what nobody holds any more is the self-test's."""
    root, started = Path("/dev/shm"), time.time() - 20
    held, abandoned = make_held(root, PREFIX), Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    try:
        os.utime(abandoned, (started + 10, started + 10))
        setting = SelfTestSetting(device="cpu", work="", started=started, killed=killed)
        text = "".join(_shared_memory(setting))
        assert held.name not in text and held.is_dir()
        assert (abandoned.name in text, abandoned.is_dir()) == (not killed, not killed)
    finally:
        for path in (held, abandoned):
            shutil.rmtree(path, ignore_errors=True)


def test_the_page_has_every_fault_and_every_stage() -> None:
    page = (Path(__file__).parents[4] / "docs" / "self-test.md").read_text()
    rows = re.findall(r"^\| (.+?) \| `([a-z-]+)` \| (.+) \|$", page, re.MULTILINE)
    assert {(what, stage) for what, stage, _ in rows} == {(fault.what, fault.stage) for fault in FAULTS}
    for what, _, words in rows:
        assert next(fault for fault in FAULTS if fault.what == what).words in words
    table = page[page.index("| stage | what it shows |") :].partition("\n\n")[0]
    stages = [
        name for line in table.splitlines()[2:] for name in re.findall(r"`([a-z0-9-]+)`", line.split("|")[1])
    ]
    assert stages == list(STAGES)


@pytest.mark.parametrize(
    ("cores", "outcome"),
    [
        ({}, "2 engines, not bound to cores"),
        ({"cores": "0-3 | 4-7"}, "2 engines, cores 0-3 | 4-7"),
        ({"cores": "0-3 | 2-7"}, "engines of grpo are bound to the same cores: 2-3"),
    ],
)
def test_engines_on_the_same_cores_fail(cores: dict[str, str], outcome: str, tmp_path: Path) -> None:
    run = tmp_path / "grpo"
    run.mkdir()
    start = {"device": {"rollout": {"weights by": "ipc", **cores}}}
    (run / "environment.json").write_text(json.dumps({"starts": [start]}))
    if outcome.startswith("engines"):
        with pytest.raises(StageFailed, match=outcome):
            _check_cores(run, 2)
    else:
        assert _check_cores(run, 2) == outcome
    (run / "environment.json").write_text(json.dumps({"starts": [{"device": {"rollout": cores}}]}))
    with pytest.raises(StageSkipped, match="did not come to send weights"):
        _check_cores(run, 2)
