"""Export a run's weights as a Hugging Face model directory or a peft adapter."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from isotrain.data.chat import end_tokens
from isotrain.engine.build import adapter_config
from isotrain.engine.checkpoint.layout import step_directory, steps_in
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.checkpoint.tensor_file import write_tensors
from isotrain.errors import CheckpointError, RecipeError
from isotrain.models.config import model_end_tokens, number_of_experts, text_config
from isotrain.models.conversion import Publisher, stored_buffers
from isotrain.models.files import load_tokenizer, model_directory
from isotrain.models.load import language_model, read_config
from isotrain.models.lora import ADAPTER, ALL, adapted_layers
from isotrain.models.packed import Backbone
from isotrain.models.vision import TOWER_MODULES, sees, tower_of
from isotrain.models.weights import INDEX, SINGLE, BaseWeights
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.load import load_resolved
from isotrain.recipe.preference import PrmSection, RmSection
from isotrain.recipe.schema import ModelSection

Read = Callable[[str], torch.Tensor]
"""From the name of a weight to its values."""

# How a model's pictures are processed, and what its other processors need.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

logger = logging.getLogger("isotrain")


def export_run(run: Path, out: Path, step: int | None, adapter_only: bool) -> Path:
    """Write one checkpoint (the newest valid one by default) of a run to `out`, which must not exist."""
    if out.exists():
        raise RecipeError(f"--out: {out} exists; choose another directory")
    directory = RunDirectory(run)
    if not directory.resolved.is_file():
        raise CheckpointError(f"{run} is not a run directory (no resolved.json)")
    recipe = load_resolved(directory.resolved)
    model = recipe.model
    reader = _open(directory.checkpoints, step)
    if adapter_only and not model.lora.rank:
        raise RecipeError("--adapter: this run trained all weights and has no adapter; remove --adapter")
    write = _write_full if not model.lora.rank else _write_adapter if adapter_only else _write_merged
    if isinstance(recipe.algorithm, RmSection):
        write = _write_scorer
    elif isinstance(recipe.algorithm, PrmSection) and recipe.algorithm.head == "classifier":
        write = _write_step_classifier
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(model, reader, partial)
        base = model_directory(model.path)
        load_tokenizer(base).save_pretrained(partial)
        for name in PROCESSOR_FILES:
            if (base / name).is_file():
                shutil.copyfile(base / name, partial / name)
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"--out: {out} was not written ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _open(root: Path, step: int | None) -> CheckpointReader:
    candidates = steps_in(root) if step is None else [step]
    complaints: list[str] = []
    for candidate in candidates:
        directory = step_directory(root, candidate)
        try:
            reader = CheckpointReader(directory)
            problems = reader.problems()
        except (ValueError, OSError) as error:
            problems = [str(error)]
        if not problems:
            for complaint in complaints:
                logger.warning("warning: %s", complaint)
            return reader
        complaints.append(f"checkpoint {directory.name} is not used: {'; '.join(problems)}")
    known = ", ".join(str(s) for s in reversed(steps_in(root))) or "none"
    raise CheckpointError(
        f"{root} has no valid checkpoint to export (steps there: {known})"
        + "".join(f"\n  {complaint}" for complaint in complaints)
    )


# Before the Hugging Face names of a checkpoint's trained weights.
PREFIX = f"weights/{Backbone.prefix}"


def _trained(reader: CheckpointReader) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of the trained weights."""
    return {
        name.removeprefix(PREFIX): shape for name, shape in reader.shapes().items() if name.startswith(PREFIX)
    }


def _write_full(model: ModelSection, reader: CheckpointReader, out: Path) -> None:
    _write_all(_described(_class_of(model), model), model, reader, out)


def _write_scorer(model: ModelSection, reader: CheckpointReader, out: Path) -> None:
    """A reward model as a sequence classifier with one label, which transformers and vLLM can serve."""
    directory = model_directory(model.path)
    config = AutoConfig.from_pretrained(directory, num_labels=1)
    # In a batch, the score of a row is that of its last token which is not padding.
    config.pad_token_id = text_config(config).pad_token_id = load_tokenizer(directory).pad_token_id
    _write_all(_described(AutoModelForSequenceClassification, model, config=config), model, reader, out)


def _write_step_classifier(model: ModelSection, reader: CheckpointReader, out: Path) -> None:
    """A process reward model as a token classifier with the labels bad and good."""
    labels = {0: "bad", 1: "good"}
    config = AutoConfig.from_pretrained(
        model_directory(model.path),
        id2label=labels,
        label2id={v: k for k, v in labels.items()},
        classifier_dropout=0.0,
    )
    _write_all(_described(AutoModelForTokenClassification, model, config=config), model, reader, out)


def _class_of(model: ModelSection) -> Any:
    return language_model(read_config(model_directory(model.path)))


def _described(kind: Any, model: ModelSection, **settings: Any) -> PreTrainedModel:
    """The model without memory for its weights, which have the types in which the base is published."""
    target: PreTrainedModel = kind.from_pretrained(
        model_directory(model.path), dtype="auto", device_map="meta", **settings
    )
    return target


def _write_all(target: PreTrainedModel, model: ModelSection, reader: CheckpointReader, out: Path) -> None:
    """All trained weights are those of the checkpoint, rounded; its float32 ones stay there."""
    # Tied ones once, as they are trained and saved.
    parameters, trained = dict(target.named_parameters()), _trained(reader)
    tower = tower_of(target) if model.vision == "frozen" else None
    frozen = {id(parameter) for parameter in tower.parameters()} if tower else set()
    kept = {name: parameter for name, parameter in parameters.items() if id(parameter) in frozen}
    if {name: tuple(p.shape) for name, p in parameters.items() if name not in kept} != trained:
        raise _mismatch(model, reader)
    base = BaseWeights(target, kept, model_directory(model.path))
    _write(
        target, lambda name: base.read(name) if name in kept else reader.whole(f"{PREFIX}{name}"), model, out
    )


def _mismatch(model: ModelSection, reader: CheckpointReader) -> CheckpointError:
    return CheckpointError(
        f"{reader.directory}: its weights do not match {model.path}; restore the model that was trained"
    )


def _write(target: PreTrainedModel, read: Read, model: ModelSection, out: Path) -> None:
    """Weights, and the two configurations as `save_pretrained` writes them."""
    target.config.dtype = str(target.dtype).removeprefix("torch.")
    target.config.architectures = [type(target).__name__]
    target.config.save_pretrained(out)
    if target.can_generate() and target.generation_config is not None:
        directory = model_directory(model.path)
        known = model_end_tokens(directory)
        ends = end_tokens(known, load_tokenizer(directory))
        if set(ends) > set(known):  # whoever serves it must stop where it was taught to
            target.generation_config.eos_token_id = list(ends)
        target.generation_config.save_pretrained(out)
    parameters, buffers = dict(target.named_parameters()), stored_buffers(target)
    base = BaseWeights(target, buffers, model_directory(model.path))
    # A buffer that the files do not have keeps its first value in whoever loads them.
    described = {**parameters, **{name: buffer for name, buffer in buffers.items() if name in base}}
    write_model_files(
        out,
        Publisher.as_loaded(target),
        described,
        lambda name: read(name) if name in parameters else base.read(name),
    )


def _write_adapter(model: ModelSection, reader: CheckpointReader, out: Path) -> None:
    trained = {name: reader.whole(f"{PREFIX}{name}") for name in _trained(reader)}
    config = adapter_config(model.lora)
    if config.target_modules == ALL and number_of_experts(read_config(model_directory(model.path))):
        # peft would look for adapters of the experts too.
        config.target_modules = sorted(adapted_layers(trained))
    if sees(read_config(model_directory(model.path))):
        config.exclude_modules = TOWER_MODULES
    config.base_model_name_or_path = model.path
    config.inference_mode = True
    config.save_pretrained(str(out))
    weights = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor for name, tensor in trained.items()
    }
    with (out / "adapter_model.safetensors").open("wb") as file:
        write_tensors(file, weights, METADATA)


def _write_merged(model: ModelSection, reader: CheckpointReader, out: Path) -> None:
    target = _described(_class_of(model), model)
    parameters = dict(target.named_parameters())
    base = BaseWeights(target, parameters, model_directory(model.path))
    trained, scale = _trained(reader), model.lora.alpha / model.lora.rank
    down, up = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"

    def turned(layer: str) -> bool:
        return isinstance(target.get_submodule(layer), Conv1D)

    fitting = {}
    for name, parameter in parameters.items():
        layer = name.removesuffix(".weight")
        if layer + down in trained:
            outputs, inputs = parameter.shape[::-1] if turned(layer) else parameter.shape
            fitting[layer + down] = (model.lora.rank, inputs)
            fitting[layer + up] = (outputs, model.lora.rank)
    if fitting != trained:
        raise _mismatch(model, reader)

    def read(name: str) -> torch.Tensor:
        layer = name.removesuffix(".weight")
        if layer + down not in trained:
            return base.read(name)
        # Merged in float32, rounded once: adding in a shorter type would lose updates below its resolution.
        a, b = (reader.whole(f"{PREFIX}{layer}{part}").float() for part in (down, up))
        merged = (b @ a).mul_(scale)
        return (merged.t() if turned(layer) else merged).add_(base.read(name).float())

    _write(target, read, model, out)


# The Hub's tools ask for files of at most this size.
FILE_BYTES = 5_000_000_000
METADATA = {"format": "pt"}


def write_model_files(
    out: Path, publish: Publisher, described: Mapping[str, torch.Tensor], read: Read
) -> None:
    """`described` are the model's own tensors, of which only type and shape count; `read` has the values.

    One file, or several of at most `FILE_BYTES` with an index.
    """
    published = _Published(publish, described, read)
    files = _split(published.tensors)
    if len(files) == 1:
        names = [SINGLE]
    else:
        stem, suffix = SINGLE.split(".")
        names = [f"{stem}-{n + 1:05d}-of-{len(files):05d}.{suffix}" for n in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        with (out / name).open("wb") as file:
            write_tensors(file, tensors, METADATA, published.read)
    if len(files) > 1:
        index = {
            "metadata": {
                "total_parameters": publish.model.num_parameters(),
                "total_size": sum(tensor.nbytes for tensor in published.tensors.values()),
            },
            "weight_map": {
                tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors
            },
        }
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _split(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    files: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    return files


class _Published:
    """The published tensors, made from the model's own when they are read."""

    def __init__(self, publish: Publisher, described: Mapping[str, torch.Tensor], read: Read) -> None:
        self._publish, self._described, self._read = publish, described, read
        self._groups = publish.groups(described)
        self._group_of: dict[str, int] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        """On the meta device, in the order of the model's parameters."""
        for number, group in enumerate(self._groups):
            shapes = {
                name: torch.empty(described[name].shape, dtype=described[name].dtype, device="meta")
                for name in group
            }
            for name, tensor in publish.together(shapes).items():
                self.tensors[name] = tensor
                self._group_of[name] = number
        self._made: tuple[int, dict[str, torch.Tensor]] = (-1, {})

    @torch.no_grad()
    def read(self, name: str) -> torch.Tensor:
        number = self._group_of[name]
        if self._made[0] != number:
            self._made = (-1, {})  # before the next one takes memory
            values = {part: self._read(part).to(self._described[part].dtype) for part in self._groups[number]}
            self._made = (number, self._publish.together(values))
        return self._made[1][name]
