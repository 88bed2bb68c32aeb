"""Start a run in its directory: check that it may resume there, and record the start."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from isotrain import hub
from isotrain.device.base import Device
from isotrain.device.determinism import Profile
from isotrain.engine.checkpoint.layout import sha256_of
from isotrain.engine.checkpoint.storage import open_storage
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.world import World
from isotrain.errors import CheckpointError, ModelError, RecipeError
from isotrain.files import open_own
from isotrain.models.files import hub_commit
from isotrain.models.packed import Backbone
from isotrain.observe.console import Console, open_console
from isotrain.observe.environment import describe_environment
from isotrain.observe.run_directory import RunDirectory, cannot_use
from isotrain.recipe.difference import MAY_CHANGE_ON_RESUME, difference, not_free, version_changes
from isotrain.recipe.load import load_resolved, resolved
from isotrain.recipe.online import PpoSection
from isotrain.recipe.schema import Recipe


@contextmanager
def open_run(recipe: Recipe, devices: int, world: World | None = None) -> Iterator[Console]:
    """A console, once the run directory is locked and may be started or resumed in; `world` are its ranks."""
    is_main = world is None or world.is_main
    silent = "console" not in recipe.observe.loggers
    with (
        run_lock(Path(recipe.output), is_main),
        open_console(silent=silent, devices=devices) if is_main else Console() as console,
    ):
        if is_main:
            prepare_output(recipe, console.message)
        if world is not None:
            world.barrier()  # nothing is moved any more
        check_run(recipe)
        yield console


def prepare_output(recipe: Recipe, tell: Callable[[str], None]) -> None:
    """Refuse a run directory that leads elsewhere; to start over, move aside what an earlier run left in it.

    One process does this, before others look.
    """
    run = RunDirectory(recipe.output)
    _check_links(recipe, run)
    if recipe.trainer.resume != "start_over":
        return
    try:
        earlier = run.set_aside()
    except OSError as error:
        raise cannot_use(run.path, error) from error
    if earlier is not None:
        tell(f"starting over: what was in {run.path} is in {earlier}")


def check_run(recipe: Recipe) -> None:
    """Refuse a run directory that this recipe cannot resume."""
    run = RunDirectory(recipe.output)
    if run.resolved.is_file():
        _check_resumable(recipe, load_resolved(run.resolved))
        if not run.checkpoints.is_dir() and _has_rows(run) and not recipe.trainer.checkpoint_storage:
            raise CheckpointError(
                f"output: {run.path} has metrics of a run, but its directory checkpoints is gone: mount or "
                "restore it and run the same command again, or set trainer.resume=start_over to move what is "
                "left to earlier-N and train from the first step"
            )


def _has_rows(run: RunDirectory) -> bool:
    return run.metrics.is_file() and run.metrics.stat().st_size > 0


def _check_links(recipe: Recipe, run: RunDirectory) -> None:
    """Training appends to, replaces and removes files: in a directory from somebody else, only its own."""
    if recipe.trainer.follow_links:
        return
    try:
        link = next(run.links_out(), None)
    except OSError as error:
        raise cannot_use(run.path, error) from error
    if link is not None:
        raise RecipeError(
            f"output: {link} is a link out of the run directory: remove it, or set trainer.follow_links=true "
            "if you made it yourself"
        )


def attach_probes(engine: TrainingEngine, recipe: Recipe, done: int) -> None:
    """Have what `observe` asks for look on at the updates after step `done`.

    A probe of later steps compares nothing unless it begins with the weights of exactly that step.
    """
    after = recipe.observe.layer_trace_after
    if after and done != after:
        raise RecipeError(
            f"observe.layer_trace_after: {recipe.output} has no checkpoint of step {after} to start from; "
            f"use `isotrain parity probe RUN --step {after} --out DIR`"
        )
    if recipe.observe.probes and done == after:
        engine.probes += resolve_name(recipe.observe.probes)(recipe, done)


def check_probe_in_run(recipe: Recipe, steps: int) -> None:
    """Before anything is computed: a probe needs steps after its checkpoint, a profile its steps."""
    profile, after = recipe.observe.profile, recipe.observe.layer_trace_after
    if late := [step for step in profile.steps if step > steps]:
        raise RecipeError(
            f"observe.profile.steps: the run ends after step {steps}, so step {late[0]} is never profiled; "
            f"give steps up to {steps}"
        )
    if after >= steps:
        raise RecipeError(
            f"observe.layer_trace_after: the run ends after step {steps}, so after step {after} nothing is "
            "left to record; probe an earlier checkpoint"
        )


def mesh_facts(recipe: Recipe) -> dict[str, Any]:
    """The mesh among the facts of a device; without one, as before there were any."""
    mesh = recipe.device.mesh
    return {"mesh": mesh.model_dump(mode="json")} if mesh.is_used else {}


def record_start(
    recipe: Recipe, source: str, device: Device, world: World, data: dict[str, str], determinism: Profile
) -> RunDirectory:
    """The run directory with this start in it; the leading rank writes it. `data` are digests."""
    check_same_data(recipe, data)
    world.barrier()  # all have checked the previous start before it is overwritten
    if world.is_main:
        described = {
            "type": device.type,
            "name": device.name(),
            "ranks": world.size,
            **mesh_facts(recipe),
            "determinism": determinism.as_json(),
        }
        write_start(recipe, source, describe_environment(described, device.numerics_variables), data)
    world.barrier()
    return RunDirectory(recipe.output)


def write_start(
    recipe: Recipe, source: str, environment: Mapping[str, object], data: dict[str, str]
) -> RunDirectory:
    """The run directory with this start in it: on which device, with which versions, on which data."""
    claim_storage(recipe, data)
    start = {**environment, "data": data, "hub": hub_commits(recipe)}
    recorded = resolved(recipe)
    if recipe.trainer.resume == "start_over":  # that was this start; a run made from this one must not do it
        recorded["trainer"]["resume"] = "auto"
    return RunDirectory.create(recipe.output, source, recorded, start)


def claim_storage(recipe: Recipe, data: dict[str, str]) -> None:
    """Refuse a storage that has checkpoints of another run: resuming from them would mix the two."""
    storage, field = open_storage(recipe.trainer.checkpoint_storage), "trainer.checkpoint_storage"
    if storage is None:
        return
    before = storage.run()
    if before is not None and storage.steps():
        if recipe.trainer.resume != "auto":
            raise RecipeError(
                f"{field}: {storage.url} already has a run; set another URL, or trainer.resume=auto"
            )
        changed = not_free(version_changes(before["recipe"], resolved(recipe)), MAY_CHANGE_ON_RESUME)
        changed += [
            f"{digest_field(name)}: other content"
            for name, digest in data.items()
            if before["data"].get(name, digest) != digest
        ]
        if changed:
            listing = "\n  ".join(changed)
            raise RecipeError(
                f"{field}: {storage.url} has checkpoints of another run:\n  {listing}\n"
                "set another URL, or change these back"
            )
    storage.claim(resolved(recipe), data)


def hub_commits(recipe: Recipe) -> dict[str, str]:
    """The commits of the models that come from the Hub, by field: a branch may be another one tomorrow."""
    paths: dict[str, str | None] = {"model.path": recipe.model.path}
    if isinstance(recipe.algorithm, PpoSection):
        paths["algorithm.critic.path"] = recipe.algorithm.critic.path
    for name in ("model", "process"):
        section = getattr(recipe.reward, name, None)
        paths[f"reward.{name}.path"] = section.path if section else None
    commits = {field: hub_commit(path, field) for field, path in paths.items() if path}
    return {field: commit for field, commit in commits.items() if commit}


def describe_model(model: Backbone) -> dict[str, Any]:
    """Type of the model and how it is computed, as `auto` has chosen, for `environment.json`."""
    return {
        "type": model.pretrained.config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "attention": model.attention,
        "fused": model.fused.operators,
        "unfused": model.fused.unknown,
    }


def check_same_data(recipe: Recipe, data: Mapping[str, str]) -> None:
    """Refuse to go on with other data, or another reference model, than the run was started with."""
    starts = RunDirectory(recipe.output).starts()
    before = starts[-1].get("hub", {}) if starts else {}
    commits = hub_commits(recipe)
    moved = [field for field, commit in commits.items() if before.get(field, commit) != commit]
    if moved:
        advice = _stay_with(before[moved[0]], commits[moved[0]], recipe.output)
        raise RecipeError(f"{', '.join(moved)}: {advice}")
    if changed := changed_since_start(recipe, data):
        raise RecipeError(
            f"{', '.join(changed)}: has changed since the run in {recipe.output} started; restore the old "
            "content, or set another output"
        )


def _stay_with(before: str, now: str, output: str) -> str:
    """Why a run cannot go on with what a hub has now, and what to do."""
    hubs = [hub.hub_of(commit) for commit in (before, now)]
    if hubs[0] != hubs[1]:
        return (
            f"the run in {output} started from {hub.TITLES[hubs[0]]}; set {hub.VARIABLE}={hubs[0]}, or "
            "another output"
        )
    if hubs[0] == hub.MODELSCOPE:
        return (
            f"ModelScope has other files there since the run in {output} started; set another output, and "
            "write name@TAG to take files that stay"
        )
    return (
        f"the Hub has another commit there since the run in {output} started from {before}; set another "
        f"output, and write name@{before} to stay with it"
    )


def changed_since_start(recipe: Recipe, digests: Mapping[str, str]) -> list[str]:
    """The fields of those digests that were others when the run was last started."""
    starts = RunDirectory(recipe.output).starts()
    before = starts[-1].get("data", {}) if starts else {}
    return [digest_field(name) for name, digest in digests.items() if before.get(name, digest) != digest]


def digest_field(name: str) -> str:
    """The recipe's field that a digest is about; others are named after their sections."""
    return f"data.{name}" if name in ("train", "validation") else f"{name}.path"


def _check_resumable(recipe: Recipe, previous: Recipe) -> None:
    if recipe.trainer.resume == "never":
        raise RecipeError(
            f"output: {recipe.output} already has a run; set another output, or trainer.resume=auto"
        )
    changed = not_free(difference(previous, recipe), MAY_CHANGE_ON_RESUME)
    if changed:
        listing = "\n  ".join(changed)
        raise RecipeError(
            f"output: {recipe.output} has a run of another recipe, which this one cannot resume:\n"
            f"  {listing}\nset another output, or change these back"
        )


@contextmanager
def run_lock(output: Path, is_main: bool) -> Iterator[None]:
    """Refuses a second job in the same run directory; the system frees the lock however a job ends."""
    if not is_main:
        yield
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = open_own(RunDirectory(output).lock, "ab")
    except OSError as error:
        raise cannot_use(output, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RecipeError(
                f"output: another process is training in {output}; wait for it, or set another output"
            ) from error
        yield


def model_digest(directory: Path) -> str:
    """SHA-256 over the weights and `config.json`; where the directory is does not count."""
    files = sorted([directory / "config.json", *directory.glob("*.safetensors")])
    try:
        with ThreadPoolExecutor(4) as pool:  # hashing leaves the interpreter's lock
            sums = list(pool.map(sha256_of, files))
    except OSError as error:
        raise ModelError(f"model.path: {error.filename} cannot be read ({error.strerror})") from error
    named = (f"{file.name}\0{digest}\n" for file, digest in zip(files, sums, strict=True))
    return hashlib.sha256("".join(named).encode()).hexdigest()
