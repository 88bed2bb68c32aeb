"""Time of a step and memory of engines, from a model's configuration, data sheets and stated guesses."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PretrainedConfig

from isotrain import hub
from isotrain.device.vendors import DataSheet
from isotrain.errors import ModelError
from isotrain.models.config import AttentionShape, attention_shapes, training_flops
from isotrain.models.load import read_config
from isotrain.recipe.online import ClusterSection, OnlineSection, PpoSection
from isotrain.recipe.schema import Recipe
from isotrain.tools.plan.known_models import known_model
from isotrain.tools.plan.memory import TrainingMemory
from isotrain.tools.plan.workload import step_samples

GB = 2**30

# Guesses, each of which a plan prints.
TRAINING_EFFICIENCY = 0.40
"""Share of the peak, in matrix products of training."""
BANDWIDTH_EFFICIENCY = 0.70
"""Share of the bandwidth of memory while tokens are generated, and of links."""
MEAN_OF_LONGEST = 0.5
"""Mean length of samples and responses, of the longest that the recipe allows."""
DECODING_STEP_SECONDS = 0.004
"""Time for one token of all running responses, beside reading memory."""
FILE_GB_S = (4.0, 0.86)
"""Weights through files in shared memory, written and loaded: on one machine, and to others. On paper
(docs/rollout.md, docs/scale.md)."""
THROUGH_FILES = "weight sync through files"
ENGINE_RESERVE_GB = 3.0
"""Part of an engine's memory for graphs and activations."""


_SHIPPED: dict[str, tempfile.TemporaryDirectory[str]] = {}


def has_shipped_sizes(path: str) -> bool:
    """Whether `config_directory` took the sizes that isotrain ships."""
    return path in _SHIPPED


def config_directory(path: str) -> Path:
    """A directory with the model's config.json; of a Hub model, nothing else is downloaded.

    Where the Hub cannot be reached, sizes of published models are those of `known_models`.
    """
    local = Path(path).expanduser()
    if (local / "config.json").is_file():
        return local
    if local.exists() or path.startswith((".", "/", "~")):
        raise ModelError(f"model.path: '{path}' has no config.json; set a Hugging Face model directory")
    try:
        return hub.download(path, files=["config.json"])
    except hub.HubError as error:
        if known := known_model(path):
            directory = _SHIPPED.setdefault(path, tempfile.TemporaryDirectory(prefix="isotrain-plan-")).name
            (Path(directory) / "config.json").write_text(json.dumps(known.config()))
            return Path(directory)
        raise ModelError(
            f"model.path: '{path}' is neither a local directory with a config.json nor {error}"
        ) from error


@dataclass(frozen=True)
class Shape:
    """Configuration of a model, without its weights."""

    config: PretrainedConfig
    attention: list[AttentionShape]
    """One of each layer."""

    @classmethod
    def of(cls, directory: Path) -> Shape:
        config = read_config(directory)
        return cls(config, attention_shapes(config))

    @property
    def layers(self) -> int:
        return len(self.attention)

    def cache_bytes(self, tensor_parallel: int, element_bytes: int) -> int:
        """Keys and values of all layers for one token, on one device of an engine."""
        heads = (max(1, layer.key_heads // tensor_parallel) * layer.head_size for layer in self.attention)
        return 2 * element_bytes * sum(heads)


def element_bytes(recipe: Recipe) -> int:
    """Size of a weight or a cached value: engines, and gathered layers, have the model's own type."""
    return 4 if recipe.model.dtype == "float32" else 2


@dataclass(frozen=True)
class EnginePlan:
    """One engine of so many devices."""

    engines: int
    tensor_parallel: int
    weights_gb: float
    cache_gb: float
    responses: int
    """How many of the longest kind fit into the cache at one time."""
    buffer_gb: float
    """The second buffer, for weights that come while the engine generates; 0 without."""
    has_room: bool
    """Whether `memory_utilization` leaves room for it; weights go through files where it does not."""


@dataclass
class StepTime:
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def bottleneck(self) -> str:
        return max(self.seconds, key=lambda part: self.seconds[part])


def plan_engines(
    recipe: Recipe, shape: Shape, memory: TrainingMemory, device_gb: float, devices: int, ranks: int
) -> EnginePlan | None:
    """By vLLM's own rule: the cache is what `memory_utilization` leaves beside weights and activations."""
    rollout = recipe.rollout
    if rollout is None:
        return None
    cluster = recipe.cluster or ClusterSection()
    each = rollout.tensor_parallel
    free = devices - ranks if cluster.placement == "separate" else devices
    engines = rollout.engines or max(1, free // each)
    weights = element_bytes(recipe) * memory.all_parameters / each
    cache = rollout.memory_utilization * device_gb * GB - weights - ENGINE_RESERVE_GB * GB
    _, longest = step_samples(recipe)
    responses = int(max(0.0, cache) // (shape.cache_bytes(each, element_bytes(recipe)) * longest))
    buffer = buffer_bytes(recipe, memory.all_parameters) / GB
    has_room = rollout.memory_utilization * device_gb + buffer <= device_gb
    return EnginePlan(engines, each, weights / GB, cache / GB, responses, buffer, has_room)


def buffer_bytes(recipe: Recipe, parameters: int) -> int:
    """Bytes on each device of an engine, which share what they load."""
    rollout = recipe.rollout
    if rollout is None or not rollout.staleness or not rollout.takes_from_devices:
        return 0
    return element_bytes(recipe) * parameters // rollout.tensor_parallel


def step_time(
    recipe: Recipe,
    shape: Shape,
    memory: TrainingMemory,
    device: DataSheet,
    ranks: int,
    engines: EnginePlan | None,
) -> StepTime:
    """Seconds of the parts of a step that follow each other."""
    result = StepTime()
    lengths = _lengths(recipe)
    peak = ranks * device.tflops * 1e12 * TRAINING_EFFICIENCY
    again = 4 / 3 if recipe.model.gradient_checkpointing else 1.0
    algorithm = recipe.algorithm
    epochs = algorithm.ppo_epochs if isinstance(algorithm, OnlineSection) else 1
    update = training_flops(memory.parameters, memory.trained, shape.config, lengths) * again / peak
    forward = 2.0 * memory.parameters * sum(lengths) / peak
    gathering = _gathering(recipe, memory, device, ranks, lengths)
    if isinstance(algorithm, OnlineSection) and engines is not None:
        result.seconds["generation"] = _generation(recipe, shape, device, engines)
        result.seconds["log-probs"] = _forward_passes(recipe, algorithm) * forward
        route, seconds = _weight_sync(recipe, memory, device, ranks, engines)
        result.seconds[route] = seconds
    trained_models = 2 if isinstance(algorithm, PpoSection) else 1
    # Layers are gathered while others compute: the slower of the two counts.
    result.seconds["update"] = epochs * trained_models * max(update, gathering)
    return result


def _weight_sync(
    recipe: Recipe, memory: TrainingMemory, device: DataSheet, ranks: int, engines: EnginePlan
) -> tuple[str, float]:
    """Its name, and seconds."""
    assert recipe.rollout is not None
    sent = element_bytes(recipe) * memory.all_parameters
    if recipe.rollout.takes_from_devices and engines.has_room:
        link = device.inside_gb_s if ranks <= device.per_machine else device.between_gb_s
        return "weight sync", sent / engines.tensor_parallel / (link * 1e9 * BANDWIDTH_EFFICIENCY)
    # With ranks on every machine of engines, each machine writes for itself.
    devices = ranks + engines.engines * engines.tensor_parallel
    cluster = recipe.cluster or ClusterSection()
    across = cluster.placement == "separate" and devices > device.per_machine
    return THROUGH_FILES, sent / (FILE_GB_S[across] * 1e9)


def _lengths(recipe: Recipe) -> list[int]:
    """Lengths of the samples of a step, all of the assumed mean."""
    rows, longest = step_samples(recipe)
    return [max(1, round(longest * MEAN_OF_LONGEST))] * rows


def _gathering(
    recipe: Recipe, memory: TrainingMemory, device: DataSheet, ranks: int, lengths: list[int]
) -> float:
    """Weights in two passes and gradients in one, for each micro-batch."""
    mesh = recipe.device.mesh
    group = ranks // mesh.replicas
    if group == 1:
        return 0.0
    data_ranks = ranks // mesh.context
    micro_batches = math.ceil(sum(lengths) / (data_ranks * recipe.data.tokens_per_micro_batch))
    gathered = 2 * memory.all_parameters * element_bytes(recipe)
    summed = 4 * memory.all_parameters * (memory.trained / max(1, memory.parameters))
    link = device.inside_gb_s if group <= device.per_machine else device.between_gb_s
    travelled = micro_batches * (gathered + summed) * (group - 1) / group
    return travelled / (link * 1e9 * BANDWIDTH_EFFICIENCY)


def _generation(recipe: Recipe, shape: Shape, device: DataSheet, engines: EnginePlan) -> float:
    """Each token of all running responses reads the weights once and their cache."""
    assert recipe.rollout is not None
    responses = math.ceil(recipe.data.batch_size * recipe.rollout.n / engines.engines)
    running = max(1, min(responses, engines.responses))
    length = recipe.rollout.max_tokens * MEAN_OF_LONGEST
    seen = recipe.data.max_length * MEAN_OF_LONGEST + length / 2
    cached = shape.cache_bytes(engines.tensor_parallel, element_bytes(recipe))
    read = engines.weights_gb * GB + running * seen * cached
    token = read / (device.memory_tb_s * 1e12 * BANDWIDTH_EFFICIENCY) + DECODING_STEP_SECONDS
    # The last ones are the longest, and run when others have ended.
    tokens = length * responses / running + recipe.rollout.max_tokens - length
    return token * tokens


def _forward_passes(recipe: Recipe, algorithm: OnlineSection) -> int:
    """Passes of a step before its updates: old log-probs, those of reference and teacher, values."""
    # With one update per step, the old log-probs are those of the update itself.
    several = algorithm.updates_per_step(recipe.data.batch_size) > 1
    old = several or algorithm.kl.place == "reward"
    teacher = algorithm.distillation.path is not None
    return old + (algorithm.kl.place != "off") + teacher + isinstance(algorithm, PpoSection)
