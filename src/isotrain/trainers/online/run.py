"""An online run from its recipe to its last step; this process is the controller."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from isotrain.cluster.cores import shared_cores
from isotrain.cluster.workers import WorkerGroup
from isotrain.device.base import Device
from isotrain.device.determinism import profile
from isotrain.errors import ClusterError
from isotrain.observe.environment import differences, without_secrets
from isotrain.observe.journal import Journal
from isotrain.recipe.online import ClusterSection, RolloutSection
from isotrain.recipe.schema import Recipe
from isotrain.trainers.build import TRAIN, open_prompts, repetition_warning, total_steps
from isotrain.trainers.job import Recorder
from isotrain.trainers.online.build import build_trainer, devices_of
from isotrain.trainers.online.policy_rank import Description, PolicyRank
from isotrain.trainers.online.precheck import (
    changed_plugins,
    check_answers,
    check_online,
    read_user_files,
    response_ends,
)
from isotrain.trainers.online.recording import (
    check_recording,
    frozen_models,
    function_digests,
    model_digests,
    model_directories,
    write_description,
)
from isotrain.trainers.online.worker_groups import assemble
from isotrain.trainers.preemption import Preemption
from isotrain.trainers.start import (
    changed_since_start,
    check_probe_in_run,
    check_same_data,
    mesh_facts,
    open_run,
    write_start,
)

# Bytes per second that a machine reads, of each model, from a file system that many share.
SLOWEST_READ = 1e8


def train_online(recipe: Recipe, source: str, preemption: Preemption | None = None) -> None:
    """Train a recipe; `source` is its text as the user wrote it."""
    assert recipe.rollout is not None and recipe.reward is not None
    rollout = recipe.rollout
    cluster = recipe.cluster or ClusterSection()
    with open_run(recipe, devices_of(recipe, cluster)) as console:
        for warning in check_online(recipe):
            console.message(f"warning: {warning}")
        cluster = with_time_to_load(cluster, model_directories(recipe).values())
        stores = open_prompts(recipe, console.message)
        if warning := repetition_warning(recipe.data, len(stores[TRAIN])):
            console.message(f"warning: {warning}")
        if rollout.generates:
            check_answers(recipe.reward, stores[TRAIN])
        digests = {name: store.digest for name, store in stores.items()}
        steps = total_steps(recipe, len(stores[TRAIN]))
        check_probe_in_run(recipe, steps)
        # Every file is read for it, at about a second for each GB and thread: only where it matters.
        every = rollout.record or rollout.replay or recipe.observe.model_digest
        digests |= model_digests(recipe, None if every else frozen_models(recipe))
        check_same_data(recipe, digests)
        files = read_user_files(recipe)
        functions = function_digests(recipe, files)
        for field in changed_since_start(recipe, functions):
            console.message(
                f"warning: {field}: the file has changed since the last start of the run in {recipe.output}; "
                "scores now come from the new file"
            )
        for warning in changed_plugins(recipe):
            console.message(f"warning: {warning}")
        if rollout.replay:
            check_recording(rollout.replay, recipe, digests, recipe.observe.last_step(steps))
        console.message(f"{recipe.name}: starting {_workers(recipe, cluster)}")
        with assemble(
            recipe,
            cluster,
            files,
            console.message,
            lambda: preemption is not None and preemption.requested,
        ) as groups:
            determinism = profile(groups.device, recipe.device.determinism, os.environ, starts=True)
            for complaint in determinism.complaints:
                console.message(f"warning: device.determinism: {complaint}")
            ranks, settings = groups.start(cluster.start_timeout)
            described = ranks[0]
            if cores := shared_cores(settings):
                console.message(f"warning: rollout engines are bound to the same cores: {cores}")
            _check_shared(groups.ranks, Path(recipe.output))
            for difference in _differences(groups.device, ranks):
                console.message(f"warning: ranks differ in {difference}")
            facts = {
                "type": described.device_type,
                "name": described.device_name,
                "ranks": len(groups.ranks),
                **mesh_facts(recipe),
                "determinism": determinism.as_json(),
                "rollout": settings,
            }
            environment = {**described.environment, "command": without_secrets(sys.argv), "device": facts}
            run = write_start(recipe, source, environment, digests | functions)
            run.add_to_start({"model": described.model})
            if rollout.record:
                write_description(recipe, digests, steps)
            console = Journal(console, run, devices=devices_of(recipe, cluster))
            resumed = groups.ranks.call(PolicyRank.resume)[0]
            resumed.report(console.message)
            recorder = Recorder(console)
            trainer = build_trainer(recipe, cluster, stores, groups, described, recorder, resumed, preemption)
            if rollout.generates:
                settings = {**settings, "weights by": trainer.weights.route}
                run.add_to_start({"device": {**facts, "rollout": settings}})
            introduction = _introduction(recipe, rollout, described, steps)
            console.message(f"{introduction}\n  {_responses(recipe, rollout, settings)}")
            if recipe.trainer.save_every is not None and not 0 < recipe.trainer.save_every < steps:
                console.message("  no checkpoint before the last step: remove or lower trainer.save_every")
            trainer.job.train(trainer, recipe, resumed.step)
        trainer.job.close(recipe.name)


def with_time_to_load(cluster: ClusterSection, models: Iterable[Path]) -> ClusterSection:
    """`start_timeout`, and the time to read the models: 141 GB from a shared file system take a while."""
    size = sum(file.stat().st_size for model in set(models) for file in model.glob("*.safetensors"))
    return cluster.model_copy(update={"start_timeout": cluster.start_timeout + size / SLOWEST_READ})


def _check_shared(ranks: WorkerGroup[PolicyRank], output: Path) -> None:
    """All ranks write their parts of a checkpoint to one directory, and wait for each other's."""
    descriptor, file = tempfile.mkstemp(prefix=".shared-", dir=output.absolute())
    os.close(descriptor)
    try:
        is_there = ranks.call(PolicyRank.finds, file)
    finally:
        os.unlink(file)
    if lacking := [where.host for where, there in zip(ranks.locations, is_there, strict=True) if not there]:
        raise ClusterError(
            f"output: {output} is not shared with {', '.join(sorted(set(lacking)))}; put it on a "
            "file system that all machines of the cluster share"
        )


def _differences(device: Device, ranks: Sequence[Description]) -> list[str]:
    hides = device.visible_devices_variable
    return differences([rank.environment for rank in ranks], {hides} if hides else set())


def _workers(recipe: Recipe, cluster: ClusterSection) -> str:
    rollout, ranks = recipe.rollout, recipe.device.ranks
    assert rollout is not None
    count = str(rollout.engine_count(ranks, cluster.placement))
    if rollout.engines is None and cluster.placement == "separate":
        count = f"at least {count}"  # the cluster has not been asked for its devices yet
    engines = f" and {count} {rollout.engine} engine(s)" if rollout.generates else ""
    return f"{ranks} training rank(s){engines}"


def _responses(recipe: Recipe, rollout: RolloutSection, settings: Mapping[str, str]) -> str:
    """The source of the responses, and where they end."""
    if not rollout.generates:
        return f"recorded responses and scores from {rollout.replay}; no engine, no validation"
    described = ", ".join(f"{name} {value}" for name, value in settings.items())
    return f"{rollout.engine} engine: {described}; responses end at {response_ends(recipe)}"


def _introduction(recipe: Recipe, rollout: RolloutSection, described: Description, steps: int) -> str:
    """A summary before the first step."""
    shared = ", prompts shared" if described.shares_prompts else ""
    return (
        f"  {steps} step{'s' * (steps != 1)} of {recipe.data.batch_size} prompts x {rollout.n} responses on "
        f"{recipe.device.ranks} x {described.device_type} ({described.device_name})\n"
        f"  {described.trained:,} of {described.parameters:,} parameters trained, "
        f"{described.model['attention']} attention{shared}\n"
        f"  fused operators: {described.fused}"
    )
