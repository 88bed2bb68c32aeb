"""Recorded machines: what is found on each, and nothing else."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import time
from pathlib import Path

import pytest

from isotrain.recipe.library import locate
from isotrain.recipe.load import load_recipe
from isotrain.tools.doctor.checks.versions import requirements
from isotrain.tools.doctor.examine import Report, examine
from isotrain.tools.doctor.facts import BUBBLEWRAP
from isotrain.tools.doctor.system import RecordedMachine, command_name

MACHINES = Path(__file__).parent / "machines"

TOO_OLD = ("bounds-of-torch", "bounds-of-transformers", "end-of-life-torch-npu")
# Errors and warnings without a recipe.
FOUND: dict[str, tuple[str, ...]] = {
    "950": ("fsdp-on-950",),
    "a2-cann-8.5": ("bounds-of-torch",),
    "allocator-variables": ("expandable-segments-with-split", "two-allocator-variables"),
    "both-accelerators": ("cuda-build-of-torch", "two-accelerators"),
    "cann-not-sourced": ("toolkit-not-switched-on",),
    "cann-without-plugin": ("toolkit-without-npu-plugin",),
    "container-without-driver": ("no-npu-visible",),
    "container-without-permission": ("no-permission-for-the-driver",),
    "cuda-old-driver": ("old-nvidia-driver",),
    "cuda-torch-and-torchvision-on-x86": ("cuda-build-of-torch",),
    "cuda-torchvision-beside-cpu-torch": ("torchvision-of-another-build",),
    "new-triton-ascend-with-triton": (),
    "cuda-without-gpu": ("no-gpu-visible",),
    "engine-mismatch": ("vllm-ascend-and-vllm",),
    "engine-without-plugin": ("vllm-without-its-plugin",),
    "expandable-segments": ("bounds-of-torch",),
    "good-a2": (),
    "good-a2-wide-table": (),
    "good-a3": (),
    "good-cpu": (),
    "good-cuda": (),
    "half-modules-a3": ("half-modules",),
    "hccl-settings": ("saturating-overflow", "blocking-launches"),
    "import-crashes": ("torch-import",),
    "mask-names-a-gap": ("mask-names-missing-devices",),
    "mask-out-of-order": ("mask-out-of-order",),
    "nnal-not-sourced": ("nnal-not-switched-on",),
    "nothing-installed": ("missing-torch",),
    "old-driver-and-firmware": ("driver-and-firmware", "driver-older-than-cann"),
    "openrlhf-0.6.2": ("bounds-of-peft", *TOO_OLD),
    "openrlhf-0.7.5": ("bounds-of-peft", *TOO_OLD),
    "openrlhf-measured": ("missing-peft", *TOO_OLD),
    "plugin-newer-than-cann": ("torch-npu-newer-than-cann",),
    "plugin-older-than-cann": ("bounds-of-torch", "torch-npu-older-than-cann"),
    "plugin-without-cann": ("npu-plugin-without-toolkit",),
    "small-shared-memory": (),
    "torch-mismatch": ("bounds-of-torch", "torch-and-torch-npu"),
    "triton-twice": ("triton-beside-triton-ascend",),
    "unhealthy-and-in-use": ("unhealthy-device", "devices-in-use"),
    "verl-first-runs": ("missing-peft", *TOO_OLD),
    "verl-june-2025-arm": ("missing-peft", *TOO_OLD, "tensordict-on-arm"),
    "verl-sglang-2025-a3": ("missing-peft", "bounds-of-torch", "bounds-of-transformers"),
    "verl-spring-2025": ("missing-peft", *TOO_OLD),
    "vllm-ascend-0.23-a2": (),
    "vllm-ascend-of-a2-on-a3": ("vllm-ascend-for-another-chip",),
    "vllm-ascend-without-nnal": ("nnal-missing",),
}
# With a recipe: what comes, or becomes an error.
FOUND_FOR: dict[tuple[str, str], tuple[str, ...]] = {
    ("good-a2", "gsm8k-sft-lora-8x"): (),
    ("good-a3", "gsm8k-sft-lora"): (),
    ("good-a3", "gsm8k-sft-lora-8x"): ("too-few-devices",),
    ("good-cuda", "gsm8k-grpo-8x"): (),
    ("good-cpu", "gsm8k-grpo"): (),
    ("good-a2", "gsm8k-grpo-8x"): ("missing-vllm",),
    ("vllm-ascend-0.23-a2", "gsm8k-grpo-8x"): (),
    ("expandable-segments", "gsm8k-grpo-8x"): ("bounds-of-torch", "bounds-of-vllm"),
    ("engine-without-plugin", "gsm8k-grpo-8x"): ("vllm-without-its-plugin",),
    ("hccl-settings", "gsm8k-sft-lora-8x"): (),
}


def examined(machine: str, recipe: str | None = None) -> Report:
    checked = load_recipe(locate(recipe)) if recipe else None
    return examine(RecordedMachine(MACHINES / machine), recipe=checked)


def test_every_machine_is_listed() -> None:
    assert set(FOUND) == {path.name for path in MACHINES.iterdir()}


@pytest.mark.parametrize("machine", FOUND)
def test_each_machine_has_its_findings_only(machine: str) -> None:
    start = time.monotonic()
    report = examined(machine)
    assert time.monotonic() - start < 30
    alarms = {finding.id for finding in report.findings if finding.level != "note"}
    assert alarms == set(FOUND[machine])
    assert all(finding.remedy for finding in report.findings)


@pytest.mark.parametrize(("machine", "recipe"), FOUND_FOR)
def test_a_recipe_that_a_machine_cannot_run_is_an_error(machine: str, recipe: str) -> None:
    errors = {finding.id for finding in examined(machine, recipe).errors}
    assert errors == set(FOUND_FOR[machine, recipe])


@pytest.mark.parametrize(
    ("address", "level", "remedy"),
    [
        ("local", "error", "write device.ranks=8, fewer rollout.engines"),
        (
            "auto",
            "warning",
            "add machines with 8 more devices to the Ray cluster, or write device.ranks=8, fewer",
        ),
        (
            "10.0.0.1:6379",
            "note",
            "add machines with 8 more devices to the Ray cluster, or write device.ranks=8,",
        ),
    ],
)
def test_devices_of_other_machines_of_a_cluster_count(address: str, level: str, remedy: str) -> None:
    recipe = load_recipe(locate("gsm8k-grpo-8x"), ["device.ranks=16", f"cluster.address={address}"])
    report = examine(RecordedMachine(MACHINES / "good-cuda"), recipe=recipe)
    (found,) = [finding for finding in report.findings if finding.id == "too-few-devices"]
    assert found.level == level and found.remedy.startswith(remedy)
    assert found.problem.startswith("the recipe needs 16 devices, but 8 are visible")


def test_little_shared_memory_names_the_size_to_set() -> None:
    found = {finding.id: finding for finding in examined("small-shared-memory", "gsm8k-grpo-8x").findings}
    assert found["little-shared-memory"].remedy == "start the container with --shm-size=16g"


def test_warns_of_settings_that_break_sleeping_engines() -> None:
    found = examined("expandable-segments", "gsm8k-grpo-8x").findings
    warnings = {finding.id for finding in found if finding.level == "warning"}
    assert {"expandable-segments-with-sleep", "nz-weights", "engine-meets-on-all-interfaces"} <= warnings
    separate = load_recipe(locate("gsm8k-grpo-8x"), ["cluster.placement=separate"])
    found = examine(RecordedMachine(MACHINES / "expandable-segments"), recipe=separate).findings
    assert "expandable-segments-with-sleep" not in {finding.id for finding in found}


def test_warns_of_settings_that_matter_to_several_ranks() -> None:
    report = examined("hccl-settings", "gsm8k-sft-lora-8x")
    warnings = {finding.id for finding in report.findings if finding.level == "warning"}
    assert warnings == {
        "saturating-overflow",
        "blocking-launches",
        "hccl-connect-timeout",
        "hccl-exec-timeout",
        "hccl-ports-taken",
    }


@pytest.mark.parametrize("variables", [{}, {"HCCL_HOST_SOCKET_PORT_RANGE": "60000-60050"}])
def test_free_ports_are_chosen_unless_the_user_sets_the_first(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    shutil.copytree(MACHINES / "hccl-settings", tmp_path / "machine")
    file = tmp_path / "machine" / "machine.json"
    machine = json.loads(file.read_text())
    if not variables:
        del machine["variables"]["HCCL_IF_BASE_PORT"]
    machine["variables"] |= variables
    file.write_text(json.dumps(machine))
    recipe = load_recipe(locate("gsm8k-sft-lora-8x"))
    found = examine(RecordedMachine(tmp_path / "machine"), recipe=recipe).findings
    assert "hccl-ports-taken" not in {finding.id for finding in found}


@pytest.mark.parametrize(
    ("ranks", "hard", "warned"), [(1024, 1024, True), (1024, 4096, False), (8, 1024, False)]
)
def test_warns_of_a_limit_of_open_files_below_the_connections(
    tmp_path: Path, ranks: int, hard: int, warned: bool
) -> None:
    """Each rank may connect to all others; the soft limit is raised by the ranks themselves."""
    shutil.copytree(MACHINES / "good-a2", tmp_path / "machine")
    limits = tmp_path / "machine" / "files" / "proc" / "self" / "limits"
    limits.parent.mkdir(parents=True, exist_ok=True)
    limits.write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max open files            512                  {hard}               files     \n"
    )
    recipe = load_recipe(locate("gsm8k-sft-lora-8x"), [f"device.ranks={ranks}"])
    found = examine(RecordedMachine(tmp_path / "machine"), recipe=recipe).findings
    assert ("few-open-files" in {finding.id for finding in found}) is warned


@pytest.mark.parametrize(
    ("said", "overrides", "problem"),
    [
        (None, ["reward.code={}"], "reward.code needs bubblewrap: it is not installed"),
        (
            "exit 1\nbwrap: No permissions\n",
            ["reward.code={}"],
            "reward.code needs bubblewrap: bwrap: No permissions",
        ),
        ("exit 0\n", ["reward.code={}"], None),
        (None, ["reward.code.sandbox=http://127.0.0.1:8080"], None),
        (None, [], None),
    ],
)
def test_code_rewards_need_a_sandbox_that_works(
    tmp_path: Path, said: str | None, overrides: list[str], problem: str | None
) -> None:
    shutil.copytree(MACHINES / "good-cpu", tmp_path / "machine")
    if said is not None:
        commands = tmp_path / "machine" / "commands"
        commands.mkdir(exist_ok=True)
        (commands / command_name(BUBBLEWRAP)).write_text(said)
    recipe = load_recipe(locate("gsm8k-grpo"), overrides)
    report = examine(RecordedMachine(tmp_path / "machine"), recipe=recipe)
    assert [finding.problem for finding in report.errors] == ([problem] if problem else [])
    assert all("apt-get install bubblewrap" in finding.remedy for finding in report.errors)


def test_warns_of_an_odd_number_of_dies_on_an_a3() -> None:
    recipe = load_recipe(locate("gsm8k-sft-lora"), ["device.ranks=3"])
    found = examine(RecordedMachine(MACHINES / "good-a3"), recipe=recipe).findings
    assert [finding.id for finding in found if finding.level == "warning"] == ["half-a-module"]
    found = examine(RecordedMachine(MACHINES / "good-a2"), recipe=recipe).findings
    assert "half-a-module" not in {finding.id for finding in found}


def test_the_remedy_is_a_command() -> None:
    (finding,) = examined("mask-out-of-order").errors
    assert finding.remedy == "export ASCEND_RT_VISIBLE_DEVICES=0,1,2"


def test_names_the_nearest_stack_and_the_way_there() -> None:
    """One with a torch that isotrain can train on, and what was published for the toolkit that is there."""
    report = examined("openrlhf-0.6.2")
    assert report.nearest and report.nearest.stack.name == "vllm-ascend 0.23.0"
    assert "CANN 8.1.RC1 -> 9.1.0" in report.nearest.changes
    assert "pip install torch==2.10.0" in report.nearest.commands, "ARM wheels have no build in their name"
    assert "OpenRLHF 0.6.2" in {stack.name for stack in report.too_old}
    x86 = examined("torch-mismatch").nearest
    assert x86 and any(line.startswith("pip install torch==2.10.0+cpu") for line in x86.commands)
    assert x86.changes == ("torch 2.9.1+cpu -> 2.10.0",)


def test_no_stack_is_named_where_versions_are_not_the_trouble() -> None:
    assert examined("mask-out-of-order").nearest is None
    assert examined("good-a2").nearest is None


def test_warns_where_isotrain_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone on PYTHONPATH has no metadata."""

    def absent(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    requirements.cache_clear()
    try:
        found = [finding for finding in examined("good-cpu").findings if finding.level == "warning"]
    finally:
        requirements.cache_clear()
    assert [finding.id for finding in found] == ["not-installed"]
    assert "pip install" in found[0].remedy
