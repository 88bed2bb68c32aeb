"""Needs of one recipe on a machine: devices, shared memory, disk, ports, open files, a sandbox."""

from __future__ import annotations

from collections.abc import Iterator

from isotrain.language import tr
from isotrain.recipe.online import ClusterSection
from isotrain.recipe.schema import Recipe
from isotrain.tools.doctor.checks.devices import visible
from isotrain.tools.doctor.facts import SHARED_MEMORY, is_number
from isotrain.tools.doctor.rules import Level, MachineFinding, Scene

_GIB = 1 << 30
# Half a billion weights; containers start with 64 MiB.
_LEAST_SHARED_MEMORY = 1 * _GIB
# A checkpoint of a 1B model with its optimizer.
_LEAST_DISK = 16 * _GIB
_HCCL_PORTS = 16
# Of a rank, besides its connections: weights, data, logs, devices.
_OTHER_FILES = 512


def check(scene: Scene) -> Iterator[MachineFinding]:
    if scene.recipe is None:
        return
    yield from _device_count(scene, scene.recipe)
    yield from _space(scene, scene.recipe)
    yield from _ports(scene)
    yield from _open_files(scene, scene.recipe)
    yield from _sandbox(scene, scene.recipe)


def devices_needed(recipe: Recipe) -> int:
    """On all machines together."""
    ranks, rollout = recipe.device.ranks, recipe.rollout
    if rollout is None or rollout.engine == "hf":
        return ranks
    placement = (recipe.cluster or ClusterSection()).placement
    engines = rollout.engine_count(ranks, placement) * rollout.tensor_parallel
    return ranks + engines if placement == "separate" else max(ranks, engines)


def _device_count(scene: Scene, recipe: Recipe) -> Iterator[MachineFinding]:
    present, needed = visible(scene), devices_needed(recipe)
    if scene.target == "npu" and scene.generation == "A3" and needed > 1 and needed % 2:
        problem = tr(
            "the recipe needs {needed} devices, but jobs on an A3 use whole modules of two devices",
            needed=needed,
        )
        remedy = tr("write device.ranks={ranks}", ranks=recipe.device.ranks + 1)
        yield MachineFinding("half-a-module", "warning", problem, remedy)
    if scene.target == "cpu" or present is None or present >= needed:
        return
    address = (recipe.cluster or ClusterSection()).address if recipe.rollout else "local"
    levels: dict[str, Level] = {"local": "error", "auto": "warning"}
    remedy = tr("write device.ranks={ranks}", ranks=present)
    if recipe.rollout:
        remedy = tr(
            "write device.ranks={ranks}, fewer rollout.engines or a smaller rollout.tensor_parallel",
            ranks=present,
        )
    # A Ray cluster may have more machines than this one; `auto` joins one that is there.
    if address != "local":
        remedy = tr(
            "add machines with {count} more devices to the Ray cluster, or {remedy}",
            count=needed - present,
            remedy=remedy,
        )
        problem = tr(
            "the recipe needs {needed} devices, but {present} are visible here",
            needed=needed,
            present=present,
        )
    else:
        problem = tr(
            "the recipe needs {needed} devices, but {present} are visible", needed=needed, present=present
        )
    yield MachineFinding("too-few-devices", levels.get(address, "note"), problem, remedy)


def _space(scene: Scene, recipe: Recipe) -> Iterator[MachineFinding]:
    shared, disk = scene.facts.free.get(SHARED_MEMORY), scene.facts.free.get(recipe.output)
    if recipe.rollout and shared is not None and shared < _LEAST_SHARED_MEMORY:
        problem = tr(
            "{shared_memory} has {shared:.2f} GiB free; weight updates go through it",
            shared_memory=SHARED_MEMORY,
            shared=shared / _GIB,
        )
        remedy = (
            tr("start the container with --shm-size=16g")
            if scene.facts.container
            else f"mount -o remount,size=16g {SHARED_MEMORY}"
        )
        yield MachineFinding("little-shared-memory", "warning", problem, remedy)
    if disk is not None and disk < _LEAST_DISK:
        problem = tr(
            "only {disk:.1f} GiB are free for the run directory ({output})",
            disk=disk / _GIB,
            output=recipe.output,
        )
        remedy = tr("set output= to a larger disk, or trainer.keep_checkpoints=1")
        yield MachineFinding("little-disk", "warning", problem, remedy)


def _ports(scene: Scene) -> Iterator[MachineFinding]:
    if scene.target != "npu" or not scene.needs or "several ranks" not in scene.needs:
        return
    # Without it our processes choose free ports; a range of the user's overrules it.
    text = scene.facts.variables.get("HCCL_IF_BASE_PORT", "")
    if not is_number(text) or scene.facts.variables.get("HCCL_HOST_SOCKET_PORT_RANGE"):
        return
    base = int(text)
    taken = sorted(scene.facts.ports & set(range(base, base + _HCCL_PORTS)))
    if taken:
        problem = tr(
            "HCCL uses ports {first} to {last}, but another process listens on {taken}",
            first=base,
            last=base + _HCCL_PORTS - 1,
            taken=", ".join(map(str, taken)),
        )
        remedy = tr("unset HCCL_IF_BASE_PORT (free ports are then chosen), or set it to 16 free ports")
        yield MachineFinding("hccl-ports-taken", "warning", problem, remedy)


def _open_files(scene: Scene, recipe: Recipe) -> Iterator[MachineFinding]:
    limit, needed = scene.facts.open_files, recipe.device.ranks + _OTHER_FILES
    if recipe.device.ranks > 1 and limit is not None and limit < needed:
        problem = tr(
            "a process may have {limit} open files here; a rank may connect to {ranks} others and "
            "needs up to {needed}",
            limit=limit,
            ranks=recipe.device.ranks - 1,
            needed=needed,
        )
        remedy = tr(
            "raise the hard limit: ulimit -Hn {needed}, or docker run --ulimit nofile={needed}", needed=needed
        )
        yield MachineFinding("few-open-files", "warning", problem, remedy)


def _sandbox(scene: Scene, recipe: Recipe) -> Iterator[MachineFinding]:
    code, error = recipe.reward and recipe.reward.code, scene.facts.bubblewrap
    if not code or code.sandbox != "bubblewrap" or not error:
        return
    remedy = tr(
        "install bubblewrap 0.8 or newer (apt-get install bubblewrap), allow user namespaces, "
        "or set reward.code.sandbox to the address of a SandboxFusion server; see "
        "docs/sandbox.md"
    )
    problem = tr("reward.code needs bubblewrap: {error}", error=error)
    yield MachineFinding("no-sandbox", "error", problem, remedy)
