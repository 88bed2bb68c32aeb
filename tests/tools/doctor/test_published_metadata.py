"""The stacks of the matrix and of requirements/ do not contradict the wheels that they name, as published."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from isotrain.tools.doctor.checks.versions import within_bounds
from isotrain.tools.doctor.matrix import Stack, is_exact, matrix

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

REPOSITORY = Path(__file__).parents[3]
# Accelerators' plug-ins want torch's build for the processor, which this machine's index need not have.
PROCESSOR_BUILDS = ("torch", "torchaudio", "torchvision")
# What the files leave out, and why.
LEFT_OUT = {
    "torch": "installed first and alone",
    "triton-ascend": "published by Ascend, not on the package index",
    "triton": "replaced by triton-ascend",
    "arctic-inference": "for one kind of speculative decoding; published as source only",
    "pip": "a part of every environment",
}
CHECKED = [stack for stack in matrix().stacks if stack.checked]

Metadata = dict[str, Any]


def published(pins: list[str], machine: str) -> dict[str, Metadata]:
    """Metadata of the wheels for Python 3.11."""
    systems = [*(f"manylinux_2_{minor}" for minor in range(35, 4, -1)), "manylinux2014", "manylinux2010"]
    systems += ["manylinux1", "linux"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--report", "-"]
    command += [
        "--ignore-installed",
        "--target",
        "nowhere",
        "--only-binary=:all:",
        "--python-version",
        "3.11",
    ]
    command += ["--implementation", "cp", "--abi", "cp311", "--abi", "abi3", "--abi", "none"]
    command += [option for system in systems for option in ("--platform", f"{system}_{machine}")]
    done = subprocess.run([*command, *pins], capture_output=True, text=True, timeout=900)
    if done.returncode:
        if "No matching distribution" in done.stderr and "from versions: none" not in done.stderr:
            pytest.fail(done.stderr[-1000:])
        pytest.skip(f"no package index with these wheels: {done.stderr.strip()[-200:]}")
    found = (one["metadata"] for one in json.loads(done.stdout)["install"])
    return {canonicalize_name(one["name"]): one for one in found}


def markers(machine: str) -> dict[str, str]:
    return {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": "3.11.9",
        "python_version": "3.11",
        "sys_platform": "linux",
    }


def asked(metadata: dict[str, Metadata], machine: str) -> Iterator[tuple[str, Requirement]]:
    """What the packages ask for on a machine, with the extras that they ask of each other."""
    left, seen = [(name, "") for name in metadata], set()
    while left:
        name, extra = one = left.pop()
        if one in seen or name not in metadata:
            continue
        seen.add(one)
        for line in metadata[name].get("requires_dist", []):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(markers(machine) | {"extra": extra}):
                yield name, requirement
                left += [(canonicalize_name(requirement.name), own) for own in requirement.extras]


def contradictions(versions: dict[str, str], metadata: dict[str, Metadata], machine: str) -> list[str]:
    """Requirements among the packages that the given versions do not meet."""
    found = []
    for name, requirement in asked(metadata, machine):
        have = versions.get(canonicalize_name(requirement.name))
        if have is not None and not requirement.specifier.contains(have, prereleases=True):
            found.append(f"{name} {versions[name]} asks for {requirement}, the stack has {have}")
    return found


@functools.cache
def one_published(name: str, version: str, machine: str) -> Metadata:
    return published([f"{name}=={version}"], machine)[canonicalize_name(name)]


def built(name: str, version: str, device: str) -> str:
    return f"{version}+cpu" if name in PROCESSOR_BUILDS and device != "cuda" else version


@pytest.mark.parametrize("stack", CHECKED, ids=lambda stack: stack.name)
def test_a_stack_does_not_contradict_its_wheels(stack: Stack) -> None:
    versions = {
        name: built(name, version, stack.device)
        for name, version in stack.packages_on("x86_64").items()
        if is_exact(version)
    }
    followed = versions.keys() - {*LEFT_OUT, *stack.no_deps}
    metadata = {name: one_published(name, stack.packages[name], "x86_64") for name in sorted(followed)}
    assert not contradictions(versions, metadata, "x86_64")
    if stack.name.startswith("isotrain"):
        outside = [name for name, version in versions.items() if not within_bounds(name, version)]
        assert not outside, "isotrain's bounds exclude them"


def test_a_contradiction_is_found() -> None:
    """The pair that made the main path impossible: transformers for vLLM 0.32 beside vllm-ascend."""
    versions = {"vllm-ascend": "0.23.0", "transformers": "5.19.0", "torch": "2.10.0+cpu"}
    metadata = {"vllm-ascend": one_published("vllm-ascend", "0.23.0", "x86_64")}
    (found,) = contradictions(versions, metadata, "x86_64")
    assert "transformers==5.5.4" in found


def own_requirements() -> list[Requirement]:
    """What isotrain asks for to train online, from its own metadata."""
    lines = map(Requirement, importlib.metadata.requires("isotrain") or [])
    extras = ("", "train", "online")
    return [one for one in lines if any(not one.marker or one.marker.evaluate({"extra": e}) for e in extras)]


@pytest.mark.parametrize(
    ("file", "machine", "torch"),
    [
        ("ascend", "x86_64", "2.10.0+cpu"),
        ("ascend", "aarch64", "2.10.0"),
        ("cuda", "x86_64", "2.13.0"),
    ],
)
def test_a_file_is_complete_and_agrees_with_its_wheels(file: str, machine: str, torch: str) -> None:
    lines = (REPOSITORY / "requirements" / f"{file}.txt").read_text().splitlines()
    pins = [line.split()[0] for line in lines if re.match(r"[A-Za-z]", line)]
    metadata = published(pins, machine)
    versions = {name: one["version"] for name, one in metadata.items()} | {"torch": torch}
    if file == "ascend":
        del metadata["vllm"]  # asks for CUDA's packages, which vllm-ascend replaces
    assert not contradictions(versions, metadata, machine)
    needed = [requirement for _, requirement in asked(metadata, machine)] + own_requirements()
    missing = {canonicalize_name(one.name) for one in needed} - versions.keys()
    assert missing <= LEFT_OUT.keys()
    for requirement in own_requirements():
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)], prereleases=True)
