"""Streamed exports hold what transformers and peft would have saved, without the memory for a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GPT2Config,
    PreTrainedModel,
)

from isotrain.data.prepare.tiny import make_tiny
from isotrain.engine import export
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.engine.export import export_run
from isotrain.errors import CheckpointError
from isotrain.models.conversion import stored_buffers
from isotrain.models.lora import ADAPTER
from isotrain.models.weights import Shard
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.load import resolved
from support import tiny_recipe

Sections = dict[str, Any]
RANK, ALPHA = 4, 16


def make_base(directory: Path, dtype: torch.dtype, architecture: Any = "llama", tie: bool = True) -> Path:
    """A published model with nothing in it that is 0 by chance."""
    make_tiny(directory, train_rows=1, validation_rows=1, architecture=architecture, tie_word_embeddings=tie)
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    for buffer in stored_buffers(model).values():
        buffer.normal_()
    model.to(dtype).save_pretrained(directory / "model")
    return directory


def make_run(tiny: Path, run: Path, weights: dict[str, torch.Tensor], **sections: Any) -> Path:
    """A run directory with these trained weights as its checkpoint of step 3."""
    recipe = tiny_recipe(tiny, run, "cpu", **sections)
    RunDirectory.create(recipe.output, "", resolved(recipe), {})
    writer = CheckpointWriter(run / "checkpoints", 0, 1, keep=1)
    shards = {
        f"weights/pretrained.{name}": Shard(tensor, tuple(tensor.shape), (0,) * tensor.ndim)
        for name, tensor in weights.items()
    }
    writer.save(3, shards, {}, {})
    writer.wait()
    assert writer.failure() is None
    return run


def trained(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def assert_same_files(found: Path, expected: Path) -> None:
    theirs, ours = load_file(expected / "model.safetensors"), tensors_in(found)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    for name in ("config.json", "generation_config.json"):
        assert (found / name).is_file() == (expected / name).is_file()
        if (expected / name).is_file():
            assert json.loads((found / name).read_text()) == json.loads((expected / name).read_text())


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in directory.glob("*.safetensors") for name, x in load_file(file).items()}


def as_causal_lm(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto")  # type: ignore[no-any-return]


def as_scorer(directory: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(directory, num_labels=1)
    config.pad_token_id = AutoTokenizer.from_pretrained(directory).pad_token_id
    return AutoModelForSequenceClassification.from_pretrained(  # type: ignore[no-any-return]
        directory, config=config, dtype="auto"
    )


def as_step_classifier(directory: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(
        directory, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1}, classifier_dropout=0.0
    )
    return AutoModelForTokenClassification.from_pretrained(  # type: ignore[no-any-return]
        directory, config=config, dtype="auto"
    )


PRM: Sections = {"algorithm": {"name": "prm", "head": "classifier"}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("architecture", "tie", "load", "sections"),
    [
        ("llama", True, as_causal_lm, {}),
        ("qwen3", False, as_causal_lm, {}),
        ("qwen3_moe", True, as_causal_lm, {}),
        ("deepseek_v3", False, as_causal_lm, {}),
        ("llama", True, as_scorer, {"algorithm": {"name": "rm"}}),
        ("qwen3_moe", False, as_scorer, {"algorithm": {"name": "rm"}}),
        ("llama", True, as_step_classifier, PRM),
    ],
)
def test_equals_what_transformers_saves(
    tmp_path: Path,
    architecture: str,
    tie: bool,
    load: Callable[[Path], PreTrainedModel],
    sections: Sections,
    dtype: torch.dtype,
) -> None:
    tiny = make_base(tmp_path / "tiny", dtype, architecture, tie)
    model = load(tiny / "model")
    weights = trained(model)
    run = make_run(tiny, tmp_path / "run", weights, **sections)
    out = export_run(run, tmp_path / "out", None, adapter_only=False)
    model.load_state_dict(weights, strict=False)
    model.save_pretrained(tmp_path / "expected")
    assert_same_files(out, tmp_path / "expected")
    again = load(out)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, weights[name].to(parameter.dtype)), name


def adapters(model: PreTrainedModel, layers: tuple[str, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    found = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in layers:
            outputs, inputs = module.weight.shape  # type: ignore[union-attr, misc]
            if type(module).__name__ == "Conv1D":
                inputs, outputs = outputs, inputs
            for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                found[f"{name}.lora_{side}.{ADAPTER}.weight"] = torch.randn(shape, generator=generator)
    assert found
    return found


def assert_merged_as_peft_does(tiny: Path, run: Path, tmp_path: Path, published: torch.dtype) -> None:
    out = export_run(run, tmp_path / "out", None, adapter_only=False)
    export_run(run, tmp_path / "adapter", None, adapter_only=True)
    base = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    kept = {name: buffer.clone() for name, buffer in stored_buffers(base).items()}
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().to(published)
    for name, buffer in kept.items():
        # A router's correction stays in float32, as it is published; `to` would round it.
        owner, _, last = name.rpartition(".")
        merged.get_submodule(owner).register_buffer(last, buffer)
    merged.save_pretrained(tmp_path / "expected")
    assert_same_files(out, tmp_path / "expected")
    assert not list(out.glob("adapter*"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "deepseek_v3"])
def test_merged_adapters_equal_those_of_peft(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    tiny = make_base(tmp_path / "tiny", dtype, architecture)
    model = as_causal_lm(tiny / "model")
    targets = ["o_proj"] if architecture == "deepseek_v3" else ["q_proj", "o_proj"]
    lora = {"rank": RANK, "alpha": ALPHA, "targets": targets}
    run = make_run(tiny, tmp_path / "run", adapters(model, tuple(targets)), model={"lora": lora})
    assert_merged_as_peft_does(tiny, run, tmp_path, dtype)


def test_weights_that_lie_the_other_way_round(tmp_path: Path) -> None:
    """GPT-2's layers have inputs first."""
    tiny = make_base(tmp_path / "tiny", torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=16, n_layer=2, n_head=2, **ends)
    model = AutoModelForCausalLM.from_config(config)
    (tiny / "model" / "generation_config.json").unlink()
    model.save_pretrained(tiny / "model")
    lora = {"rank": RANK, "alpha": ALPHA, "targets": ["c_attn", "c_proj"]}
    run = make_run(tiny, tmp_path / "run", adapters(model, ("c_attn", "c_proj")), model={"lora": lora})
    assert_merged_as_peft_does(tiny, run, tmp_path, torch.float32)


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny = make_base(tmp_path / "tiny", torch.float32)
    weights = adapters(as_causal_lm(tiny / "model"), ("q_proj",))
    weights = {name.replace("layers.0", "layers.9"): tensor for name, tensor in weights.items()}
    lora = {"rank": RANK, "alpha": ALPHA, "targets": ["q_proj"]}
    run = make_run(tiny, tmp_path / "run", weights, model={"lora": lora})
    with pytest.raises(CheckpointError, match="its weights do not match"):
        export_run(run, tmp_path / "out", None, adapter_only=False)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_several_files_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    tiny = make_base(tmp_path / "tiny", torch.bfloat16, architecture)
    model = as_causal_lm(tiny / "model")
    weights = trained(model)
    run = make_run(tiny, tmp_path / "run", weights)
    model.load_state_dict(weights, strict=False)
    model.save_pretrained(tmp_path / "one")
    limit = 3 * max(tensor.nbytes for tensor in tensors_in(tmp_path / "one").values())
    model.save_pretrained(tmp_path / "expected", max_shard_size=limit)
    monkeypatch.setattr(export, "FILE_BYTES", limit)
    out = export_run(run, tmp_path / "out", None, adapter_only=False)
    assert_same_files(out, tmp_path / "one")
    ours, theirs = (
        json.loads((path / "model.safetensors.index.json").read_text())
        for path in (out, tmp_path / "expected")
    )
    assert ours["metadata"] == theirs["metadata"] and ours["weight_map"].keys() == theirs["weight_map"].keys()
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(files) > 1 and set(ours["weight_map"].values()) == set(files)
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((out / file).stat().st_size < limit + 100_000 for file in files)
    for name, parameter in as_causal_lm(out).named_parameters():
        assert torch.equal(parameter, weights[name].to(parameter.dtype)), name


LAYERS, WIDTH = 12, 768

MEASURE = """
import sys, threading, time
from pathlib import Path
from isotrain.engine.export import export_run

def used():
    # Without pages of files, which the system takes back whenever it needs them.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

run, small, out = map(Path, sys.argv[1:])
export_run(small, out / "small", None, adapter_only=False)  # imports and first uses are no part of it
before, peak, done = used(), 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, used())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
export_run(run, out / "large", None, adapter_only=False)
done = True
thread.join()
print(peak - before)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("lora", [False, True])
def test_memory_is_that_of_a_layer(tmp_path: Path, lora: bool) -> None:
    runs = []
    for name, layers in (("small", 1), ("large", LAYERS)):
        tiny = make_base(tmp_path / name, torch.float32)
        config = AutoConfig.from_pretrained(tiny / "model")
        config.update({"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": layers})
        config.update({"head_dim": WIDTH // config.num_attention_heads})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(tiny / "model")
        targets = ["q_proj", "down_proj"]
        sections = {"lora": {"rank": RANK, "alpha": ALPHA, "targets": targets}} if lora else {}
        weights = adapters(model, tuple(targets)) if lora else trained(model)
        runs.append(make_run(tiny, tmp_path / f"{name}-run", weights, model=sections))
    layer = sum(p.numel() for p in model.get_submodule("model.layers.0").parameters()) * 4
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(runs[1]), str(runs[0]), str(tmp_path / "out")],
        # Freed memory goes back to the system at once, so that it does not count.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    used = int(done.stdout.splitlines()[-1])
    print(f"peak {used / 2**20:.0f} MiB, a layer {layer / 2**20:.0f} MiB, all {LAYERS * layer / 2**20:.0f}")
    # The largest tensor alone must be seen: otherwise nothing was measured.
    assert WIDTH * 4 * WIDTH * 2 < used < 1.5 * layer
    assert CheckpointReader(runs[1] / "checkpoints" / "step-00000003").problems() == []
