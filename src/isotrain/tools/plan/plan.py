"""Will a recipe fit on so many devices, how long is a step, and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.data.rows import local_rows
from isotrain.device.vendors import DataSheet
from isotrain.errors import PlanError, RecipeError
from isotrain.recipe.load import check_values, path_override, resolved
from isotrain.recipe.online import ClusterSection, PpoSection
from isotrain.recipe.schema import Recipe
from isotrain.tools.plan.estimate import (
    GB,
    EnginePlan,
    Shape,
    StepTime,
    config_directory,
    has_shipped_sizes,
    plan_engines,
    step_time,
)
from isotrain.tools.plan.memory import TrainingMemory, training_memory
from isotrain.tools.plan.workload import step_samples

# Guesses: what a process takes by itself, and what an allocator cannot use.
CONTEXT_GB = 1.5
FRAGMENTATION = 0.05
SLEEPING_ENGINE_GB = 4.0
"""Context, graphs and communicators of an engine that sleeps beside a rank. Nearly 7 GB were reported of vLLM
with a model of a trillion parameters."""


@dataclass(frozen=True)
class RecipePlan:
    recipe: Recipe
    changes: tuple[str, ...]
    """Overrides of the recipe that was given."""
    device: DataSheet
    device_gb: float
    devices: int
    ranks: int
    memory: TrainingMemory
    engines: EnginePlan | None
    time: StepTime

    @property
    def buffers_gb(self) -> float:
        """Buffers of the communicators that the step uses, if nobody has set their size."""
        sizes = zip(self.memory.communicators, self.device.communicator_gb, strict=True)
        return sum(count * size for count, size in sizes)

    @property
    def steps(self) -> int | None:
        """Steps of the run; None where its rows cannot be counted here."""
        recipe = self.recipe
        rows = 0 if recipe.trainer.steps else local_rows(recipe.data.train)
        return recipe.trainer.steps or -(-rows * recipe.trainer.epochs // recipe.data.batch_size) or None

    @property
    def shipped_sizes(self) -> list[str]:
        """Models whose config.json could not be reached, so that the sizes that isotrain ships were taken."""
        algorithm = self.recipe.algorithm
        critic = algorithm.critic.path if isinstance(algorithm, PpoSection) else None
        return [
            path
            for path in dict.fromkeys((self.recipe.model.path, critic))
            if path and has_shipped_sizes(path)
        ]

    @property
    def guessed_gb(self) -> dict[str, float]:
        """What else is on a device, by what it is."""
        guessed = {"the process": CONTEXT_GB, "fragments": FRAGMENTATION * self.memory.peak / GB}
        rollout, cluster = self.recipe.rollout, self.recipe.cluster or ClusterSection()
        if rollout is not None and cluster.placement == "colocated":
            awake = rollout.memory_utilization * self.device_gb
            name = "a sleeping engine" if cluster.offload else "an engine"
            guessed[name] = min(SLEEPING_ENGINE_GB, awake) if cluster.offload else awake
        return guessed

    @property
    def needed_gb(self) -> float:
        """At the worst moment of training."""
        return self.memory.peak / GB + self.buffers_gb + sum(self.guessed_gb.values())

    @property
    def problems(self) -> list[str]:
        problems = []
        if self.needed_gb > self.device_gb:
            problems.append(f"training needs {self.needed_gb:.1f} GB of {self.device_gb:.0f}")
        if self.engines is not None and self.engines.responses < 1:
            problems.append(
                f"an engine's cache has {self.engines.cache_gb:.1f} GB, which does not hold one response: "
                "raise rollout.tensor_parallel or rollout.memory_utilization"
            )
        return problems

    @property
    def fits(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "problems": self.problems,
            "changes": list(self.changes),
            "shipped_sizes": self.shipped_sizes,
            "devices": self.devices,
            "ranks": self.ranks,
            "device": self.device.title,
            "device_gb": self.device_gb,
            "needed_gb": round(self.needed_gb, 2),
            "guessed_gb": {name: round(size, 2) for name, size in self.guessed_gb.items()},
            "training_peak_bytes": self.memory.peak,
            "training_peak_phase": self.memory.phase,
            "training_peak_parts": self.memory.parts,
            "communicators": self.memory.communicators,
            "communicators_gb": round(self.buffers_gb, 2),
            "host_bytes_per_rank": self.memory.host,
            "parameters": self.memory.all_parameters,
            "engine": None if self.engines is None else self.engines.__dict__,
            "seconds": {name: round(value, 2) for name, value in self.time.seconds.items()},
            "step_seconds": round(self.time.total, 2),
            "bottleneck": self.time.bottleneck,
            "steps": self.steps,
            "run_hours": None if self.steps is None else round(self.steps * self.time.total / 3600, 2),
        }


def make_plan(
    recipe: Recipe, devices: int, device: DataSheet, device_gb: float, changes: tuple[str, ...] = ()
) -> RecipePlan:
    recipe = _changed(recipe, [*changes, *_placed(recipe, devices)])
    _refuse(recipe)
    directory = config_directory(recipe.model.path)
    shape, ranks = Shape.of(directory), recipe.device.ranks
    fake = _changed(recipe, _fake_changes(recipe, directory))
    memory = training_memory(fake, shape.layers, ranks, _micro_batches(recipe))
    engines = plan_engines(recipe, shape, memory, device_gb, devices, ranks)
    time = step_time(recipe, shape, memory, device, ranks, engines)
    return RecipePlan(recipe, changes, device, device_gb, devices, ranks, memory, engines, time)


def _changed(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    return check_values(resolved(recipe), "the recipe", overrides)


def _refuse(recipe: Recipe) -> None:
    """Refuse recipes that a fake step cannot plan."""
    mesh = recipe.device.mesh
    if mesh.replicas > 1:
        raise PlanError(
            "device.mesh.replicas cannot be planned: set it to 1, and --devices to those of one copy "
            f"({recipe.device.ranks // mesh.replicas})"
        )
    if mesh.expert > 1:
        raise PlanError(
            "device.mesh.expert cannot be planned, because tokens decide how many go where: set it to 1, "
            "which needs more memory for gathered layers"
        )


def _fake_changes(recipe: Recipe, directory: Path) -> list[str]:
    """Configurations instead of models; fake attention is a flash kernel's, and nothing is fused."""
    changes = [path_override("model.path", directory), "model.fused=off"]
    if recipe.model.attention == "flash":
        changes.append("model.attention=auto")
    algorithm = recipe.algorithm
    if isinstance(algorithm, PpoSection) and algorithm.critic.path is not None:
        changes.append(path_override("algorithm.critic.path", config_directory(algorithm.critic.path)))
    return changes


def _placed(recipe: Recipe, devices: int) -> list[str]:
    """Training ranks: all devices, or those that engines of their own leave."""
    rollout, cluster = recipe.rollout, recipe.cluster
    ranks = devices
    if rollout is not None and cluster is not None and cluster.placement == "separate":
        engines = (rollout.engines or 0) * rollout.tensor_parallel
        ranks = devices - engines if 0 < engines < devices else max(1, devices // 2)
    return [f"device.ranks={ranks}", *_without_reward_models(recipe)]


def _without_reward_models(recipe: Recipe) -> list[str]:
    reward = recipe.reward
    if reward is None or (reward.model is None and reward.process is None):
        return []
    return ["reward.model=null", "reward.process=null", "reward.function.path=plan.py:score"]


def _micro_batches(recipe: Recipe) -> int:
    """Micro-batches of one update and rank that matter: from the second on, gradients are there."""
    rows, longest = step_samples(recipe)
    data_ranks = recipe.device.ranks // recipe.device.mesh.context
    return min(2, max(1, math.ceil(rows * longest / (data_ranks * recipe.data.tokens_per_micro_batch))))


def alternatives(recipe: Recipe, ranks: int) -> Iterator[tuple[str, ...]]:
    """Changes that need less memory, those that cost least first."""
    budget = recipe.data.tokens_per_micro_batch
    _, longest = step_samples(recipe)
    smaller = max(longest, budget // 4)
    shorter = (f"data.tokens_per_micro_batch={smaller}",) if smaller < budget else ()
    yield ()
    if shorter:
        yield shorter
    yield (*shorter, "model.offload.activations=true")
    for context in (2, 4, 8):
        if ranks % context == 0:
            yield (*shorter, f"device.mesh.context={context}")
            yield (*shorter, f"device.mesh.context={context}", "model.offload.activations=true")
    yield (*shorter, "model.offload.optimizer=true", "model.offload.activations=true")
    yield (*shorter, "model.offload.weights=true", "model.offload.activations=true")


def search(recipe: Recipe, devices: int, device: DataSheet, device_gb: float) -> Iterator[RecipePlan]:
    """Plans in the order of `alternatives`, up to the first that fits."""
    ranks = _changed(recipe, _placed(recipe, devices)).device.ranks
    for changes in alternatives(recipe, ranks):
        try:
            plan = make_plan(recipe, devices, device, device_gb, changes)
        except (RecipeError, PlanError):
            if not changes:
                raise
            continue  # this recipe does not allow that change
        yield plan
        if plan.fits:
            return
