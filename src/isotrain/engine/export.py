"""Export a run's weights as a Hugging Face model directory or a peft adapter."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from isotrain.engine.build import adapter_config
from isotrain.engine.checkpoint.layout import share, step_directory, steps_in
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.checkpoint.tensor_file import write_tensors
from isotrain.errors import CheckpointError, RecipeError
from isotrain.models.backbone import Backbone
from isotrain.models.load import load_tokenizer, model_directory, read_config
from isotrain.models.lora import ADAPTER, ALL, adapted_layers
from isotrain.models.routing import number_of_experts
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.load import load_resolved
from isotrain.recipe.preference import PrmSection, RmSection
from isotrain.recipe.schema import ModelSection

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
        load_tokenizer(model_directory(model.path)).save_pretrained(partial)
        for file in partial.glob("*.safetensors"):
            share(file)
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


def _weights(reader: CheckpointReader) -> dict[str, torch.Tensor]:
    """The trained weights under their Hugging Face names."""
    prefix = f"weights/{Backbone.prefix}"
    return {
        name.removeprefix(prefix): reader.whole(name) for name in reader.shapes() if name.startswith(prefix)
    }


def _write_full(model: ModelSection, reader: CheckpointReader, out: Path) -> None:
    # The type in which the base model is published; the float32 master weights stay in the checkpoint.
    causal_lm = AutoModelForCausalLM.from_pretrained(model_directory(model.path), dtype="auto")
    _fill(causal_lm, _weights(reader), reader, model)
    causal_lm.save_pretrained(out)


def _write_scorer(model: ModelSection, reader: CheckpointReader, out: Path) -> None:
    """A reward model as a sequence classifier with one label, which transformers and vLLM can serve."""
    directory = model_directory(model.path)
    config = AutoConfig.from_pretrained(directory, num_labels=1)
    # In a batch, the score of a row is that of its last token which is not padding.
    config.pad_token_id = load_tokenizer(directory).pad_token_id
    scorer = AutoModelForSequenceClassification.from_pretrained(directory, config=config, dtype="auto")
    _fill(scorer, _weights(reader), reader, model)
    scorer.save_pretrained(out)


def _write_step_classifier(model: ModelSection, reader: CheckpointReader, out: Path) -> None:
    """A process reward model as a token classifier with the labels bad and good."""
    directory = model_directory(model.path)
    labels = {0: "bad", 1: "good"}
    config = AutoConfig.from_pretrained(
        directory, id2label=labels, label2id={v: k for k, v in labels.items()}, classifier_dropout=0.0
    )
    classifier = AutoModelForTokenClassification.from_pretrained(directory, config=config, dtype="auto")
    _fill(classifier, _weights(reader), reader, model)
    classifier.save_pretrained(out)


def _fill(
    target: PreTrainedModel, weights: dict[str, torch.Tensor], reader: CheckpointReader, model: ModelSection
) -> None:
    named = dict(target.named_parameters())  # tied ones once, as they are trained and saved
    if {n: p.shape for n, p in named.items()} != {n: w.shape for n, w in weights.items()}:
        raise CheckpointError(
            f"{reader.directory}: its weights do not match {model.path}; restore the model that was trained"
        )
    target.load_state_dict(weights, strict=False)


def _write_adapter(model: ModelSection, reader: CheckpointReader, out: Path) -> None:
    trained = _weights(reader)
    config = adapter_config(model.lora)
    if config.target_modules == ALL and number_of_experts(read_config(model_directory(model.path))):
        # peft would look for adapters of the experts too.
        config.target_modules = sorted(adapted_layers(trained))
    config.base_model_name_or_path = model.path
    config.inference_mode = True
    config.save_pretrained(str(out))
    weights = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor for name, tensor in trained.items()
    }
    with (out / "adapter_model.safetensors").open("wb") as file:
        write_tensors(file, weights, {"format": "pt"})


def _write_merged(model: ModelSection, reader: CheckpointReader, out: Path) -> None:
    adapter = out / "adapter"
    adapter.mkdir()
    _write_adapter(model, reader, adapter)
    # Merged in float32, rounded once: adding in a shorter type would lose updates below its resolution.
    directory = model_directory(model.path)
    published = AutoConfig.from_pretrained(directory).dtype or torch.float32
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    shutil.rmtree(adapter)
    merged.to(published).save_pretrained(out)
