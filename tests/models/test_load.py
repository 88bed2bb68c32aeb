from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from isotrain.data.prepare.tiny import Architecture, make_tiny
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.world import join_world
from isotrain.errors import ModelError
from isotrain.models.files import load_tokenizer, model_directory
from isotrain.models.load import build_causal_lm, materialise, move_buffers
from isotrain.models.packed import Backbone
from isotrain.models.weights import WeightFiles, load_weights, shard_of
from isotrain.recipe.schema import ModelSection, OptimizerSection
from support import rank_of_two

LENGTHS = (7, 1, 12)


@pytest.fixture(scope="module", params=["llama-tied", "llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, _, tied = request.param.partition("-")
    return make_model(tmp_path_factory.mktemp(request.param), architecture, bool(tied))


def make_model(out: Path, architecture: Architecture = "llama", tied: bool = True) -> Path:
    make_tiny(out, train_rows=1, validation_rows=1, architecture=architecture, tie_word_embeddings=tied)
    return out / "model"


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A model directory to break."""
    return Path(shutil.copytree(tiny / "model", tmp_path / "model"))


def reference(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model


@pytest.fixture
def engine(directory: Path, device_type: str) -> Iterator[TrainingEngine]:
    section = ModelSection(path=str(directory), dtype="float32", fused="off")
    device = choose_device(device_type)
    with join_world(device) as world:
        yield build_engine(section, OptimizerSection(), device=device, world=world, seed=0)


def test_an_engine_has_exactly_the_weights_of_the_files(engine: TrainingEngine, directory: Path) -> None:
    expected = dict(reference(directory).named_parameters())
    found = {name.removeprefix(Backbone.prefix): p for name, p in engine.model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        local = shard_of(parameter).local
        assert local.device.type == engine.world.device.type and local.dtype == torch.float32
        assert torch.equal(local.cpu(), expected[name]), name
    causal_lm = engine.model.pretrained
    tied = causal_lm.get_output_embeddings().weight is causal_lm.get_input_embeddings().weight
    assert tied == causal_lm.config.tie_word_embeddings


def test_logits_equal_those_of_transformers(engine: TrainingEngine, directory: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens_T = torch.randint(0, 500, (sum(LENGTHS),), generator=generator)
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    all_T = torch.arange(sum(LENGTHS))
    device = engine.world.device
    with torch.no_grad():
        logits_TV = engine.model(
            tokens_T.to(device),
            positions_T.to(device),
            LENGTHS,
            all_T.to(device),
            tokens_T.to(device),
            lambda head: head.hidden_ND @ head.weight_VD.t(),
        )
        model = reference(directory).eval()
        expected = [model(input_ids=sample[None]).logits[0] for sample in tokens_T.split(LENGTHS)]
    torch.testing.assert_close(logits_TV.cpu(), torch.cat(expected), rtol=0, atol=1e-5)


def test_building_takes_no_memory(directory: Path) -> None:
    model = build_causal_lm(directory, "sdpa")
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
    expected = dict(reference(directory).named_buffers())
    buffers = dict(model.named_buffers())
    assert buffers.keys() == expected.keys() and buffers, "the rotary frequencies at least"
    for name, buffer in buffers.items():
        assert torch.equal(buffer, expected[name]), name


def test_memory_comes_with_materialise(tiny: Path, device_type: str) -> None:
    model = build_causal_lm(tiny / "model", "sdpa")
    device = torch.device(device_type)
    before = torch.npu.memory_allocated()
    move_buffers(model, device)
    assert all(buffer.device.type == device_type for buffer in model.buffers())
    assert all(p.is_meta for p in model.parameters())
    assert torch.npu.memory_allocated() - before < 4096
    materialise(model, device)
    assert all(p.device.type == device_type and p.dtype == torch.float32 for p in model.parameters())


def test_building_an_engine_takes_the_memory_of_its_weights(directory: Path) -> None:
    gc.collect()
    device = choose_device("npu")
    section = ModelSection(path=str(directory), dtype="float32", fused="off")
    with join_world(device) as world:
        before = device.memory().allocated
        torch.npu.reset_peak_memory_stats()
        engine = build_engine(section, OptimizerSection(), device=device, world=world, seed=0)
        weights = 4 * sum(p.numel() for p in engine.model.parameters())
        tied = 4 * 512 * 64 * engine.model.pretrained.config.tie_word_embeddings  # for a moment there are two
        assert weights <= device.memory().allocated - before < 1.01 * weights
        assert device.memory().peak - before < 1.01 * weights + tied


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_own_part(tmp_path: Path, rank: int) -> None:
    # Five rows over two ranks are three and two; of a single row, the second rank has none.
    whole = {"matrix": torch.arange(15.0).view(5, 3), "vector": torch.tensor([7.0])}
    save_file(whole, tmp_path / "model.safetensors")
    model = build_causal_lm(make_model(tmp_path / "any"), "sdpa")
    with rank_of_two(rank) as mesh:
        parameters = {
            name: nn.Parameter(distribute_tensor(-torch.ones_like(x), mesh, [Shard(0)], src_data_rank=None))
            for name, x in whole.items()
        }
        load_weights(model, parameters, WeightFiles(tmp_path))
        found = [shard_of(p).local.tolist() for p in parameters.values()]
    assert found == ([[[0, 1, 2], [3, 4, 5], [6, 7, 8]], [7]], [[[9, 10, 11], [12, 13, 14]], []])[rank]


def test_several_files_are_read_as_one(tiny: Path, tmp_path: Path) -> None:
    model = reference(tiny / "model")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert loaded(tmp_path).keys() == dict(model.named_parameters()).keys()
    for name, tensor in loaded(tmp_path).items():
        assert torch.equal(tensor, model.get_parameter(name)), name


def test_weights_of_a_narrower_type_are_widened(tiny: Path, tmp_path: Path) -> None:
    model = reference(tiny / "model").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    for name, tensor in loaded(tmp_path).items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, model.get_parameter(name).float()), name


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    model = build_causal_lm(directory, "sdpa")
    parameters = {name: nn.Parameter(torch.empty(p.shape)) for name, p in model.named_parameters()}
    load_weights(model, parameters, WeightFiles(directory))
    return {name: p.detach() for name, p in parameters.items()}


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_refuses_a_missing_tensor(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"no weights for 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        loaded(copy)


def test_refuses_a_tensor_of_another_shape(copy: Path) -> None:
    change(copy / "config.json", intermediate_size=100)
    with pytest.raises(
        ModelError, match=r"_proj\.weight' has shape \(192, 64\), config\.json says \(100, 64\)"
    ):
        loaded(copy)


def test_refuses_weights_that_are_not_safetensors(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no model\.safetensors; convert .* \(pickles are never loaded\)"):
        WeightFiles(copy)


@pytest.mark.parametrize("outside", ["../model.safetensors", "/etc/passwd", "weights/model.safetensors"])
def test_refuses_an_index_that_points_outside(copy: Path, outside: str) -> None:
    names = load_file(copy / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, outside)}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="the weight index points outside the directory"):
        loaded(copy)


def test_refuses_a_directory_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json; set a Hugging Face model directory"):
        model_directory(str(tmp_path))
    with pytest.raises(ModelError, match=r"'\./typo' does not exist"):
        model_directory("./typo")
    for name in ("resolved.json", "metrics.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match="is a run, not a model; write its model with isotrain export"):
        model_directory(str(tmp_path))


def test_refuses_a_name_that_is_nowhere() -> None:
    with pytest.raises(ModelError, match=r"'nobody/nothing' is neither a local .* on the Hugging"):
        model_directory("nobody/nothing")


def test_a_tokenizer_reads_back_what_it_wrote(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny / "model")
    assert tokenizer.decode(tokenizer("1 + 2 = 3")["input_ids"]) == "1 + 2 = 3"


def test_a_model_without_experts_ignores_how_they_are_computed(tiny: Path) -> None:
    """transformers refuses to be told, and devices tell for all models."""
    model = build_causal_lm(tiny / "model", "sdpa", "grouped_mm")
    assert model.config._experts_implementation == "eager"
