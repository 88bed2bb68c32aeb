"""The stages of the self-test in order: what each shows, what it needs, and how long it may take.

The order is that of what a minute tells: a budget that is too small leaves out the long runs at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from isotrain.errors import install
from isotrain.tools.doctor.self_test.verdicts import SelfTestSetting

# Some twenty processes start, five of them with vLLM, which takes minutes on an NPU.
BUDGET_MINUTES = 40
# Of these, kept for the last part, which is to say what is left behind.
LAST_SECONDS = 120.0

Reason = str
"""Why a part does not run; empty if it does."""


def _two_devices(setting: SelfTestSetting) -> Reason:
    return "" if setting.devices > 1 else "there is one device; it needs two"


def _vllm(setting: SelfTestSetting) -> Reason:
    return "" if setting.engine == "vllm" else "it needs vLLM for this device, which is not installed"


def _ray(_: SelfTestSetting) -> Reason:
    return "" if find_spec("ray") else f"it needs Ray: {install('online')}"


def _cluster(setting: SelfTestSetting) -> Reason:
    return _ray(setting) if setting.cluster else "it needs --cluster HOST:PORT, a Ray cluster of two machines"


@dataclass(frozen=True)
class SelfTestPart:
    """A program that gives the verdicts on some stages, one after the other."""

    module: str
    stages: dict[str, str]
    """Names, and what each shows."""
    timeout: float
    why_not: Callable[[SelfTestSetting], Reason] = lambda setting: ""
    mode: str = ""
    after: str = "devices"
    """The stage without which this part would fail for a reason that is known."""
    independent: bool = False
    """Whether a stage can pass although one before it failed."""


DEVICES = SelfTestPart("devices", {"devices": "devices and their memory are visible"}, 120, after="")

PARTS: tuple[SelfTestPart, ...] = (
    DEVICES,
    SelfTestPart(
        "collectives",
        {"collectives": "each collective between the devices gives exact results"},
        240,
        _two_devices,
    ),
    SelfTestPart(
        "attention",
        {
            "attention": "attention over packed samples agrees with float64 on the host",
            "attention-backward": "gradients of attention agree with float64 on the host",
        },
        180,
    ),
    SelfTestPart("experts", {"experts": "rows of a mixture come to experts in the host's order"}, 180),
    SelfTestPart(
        "sharing",
        {
            "shared-memory": "processes that see some devices read memory of one that sees all",
            "communicator": "after a broadcast that fails, a group of the same name works",
        },
        240,
        independent=True,
    ),
    SelfTestPart(
        "rollout",
        {
            "engine-start": "the generation engine starts",
            "generation": "the engine's log-probs are those of the model on the host",
            "weight-update": "the engine accepts new weights, and refuses damaged ones",
            "sleep": "a sleeping engine frees its memory; it wakes up and accepts new weights",
        },
        300,
    ),
    SelfTestPart(
        "runs",
        {
            "sft": "20 steps of SFT in float32 have the host's losses",
            "fused": "the device's fused operators have the same losses as none",
            "two-ranks": "two ranks have the losses of one",
            "sft-bfloat16": "20 steps of SFT in bfloat16 have the host's losses",
            "repeatable": "two runs with device.determinism=on are bitwise identical",
        },
        240,
        mode="sft",
        independent=True,
    ),
    SelfTestPart(
        "runs",
        {
            "colocated-save": "GRPO with rollout and training on the same devices saves, and resumes",
            "weight-route": "weights go to engines from device to device, not through files",
            "engine-cores": "engines of one machine are not bound to the same cores",
        },
        600,
        _ray,
        mode="colocated",
        after="weight-update",
        independent=True,
    ),
    SelfTestPart(
        "rollout",
        {"graphs": "an engine with captured graphs uses new weights"},
        600,
        _vllm,
        mode="graphs",
        after="weight-update",
    ),
    SelfTestPart(
        "rollout",
        {"tensor-parallel": "an engine on two devices accepts new weights"},
        600,
        lambda setting: _vllm(setting) or _two_devices(setting),
        mode="tensor-parallel",
        after="weight-update",
    ),
    SelfTestPart(
        "runs",
        {"two-machines": "GRPO with rollout and training on two machines"},
        600,
        _cluster,
        mode="two-machines",
        after="weight-update",
    ),
    SelfTestPart(
        "devices",
        {"memory-returned": "no process, device memory or shared memory is left"},
        LAST_SECONDS,
        mode="leftovers",
    ),
)

STAGES: dict[str, str] = {name: shows for part in PARTS for name, shows in part.stages.items()}
