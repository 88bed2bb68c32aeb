"""Published files hold one tensor per expert; the model's fused parameters are made from them and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from isotrain.data.prepare.tiny import make_tiny
from isotrain.errors import ModelError
from isotrain.models.conversion import Publisher, conversions, published_shapes, stored_buffers
from isotrain.models.load import build_causal_lm
from isotrain.models.weights import WeightFiles, load_weights, shard_of
from support import rank_of_two

FUSED = "model.layers.1.mlp.experts.gate_up_proj"
EXPERT = "model.layers.1.mlp.experts.{}.{}.weight"


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    make_tiny(out, train_rows=1, validation_rows=1, architecture=request.param)
    model = reference(out / "model")
    for buffer in stored_buffers(model).values():
        buffer.normal_()  # a router's correction is 0 in a new model: nothing would tell that it was read
    model.save_pretrained(out / "model")
    return out / "model"


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    """A model directory to change."""
    return Path(shutil.copytree(directory, tmp_path / "model"))


def reference(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model


def own(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **stored_buffers(model)}


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    model = build_causal_lm(directory, "sdpa")
    empty = {name: nn.Parameter(torch.empty(p.shape)) for name, p in model.named_parameters()}
    tensors = {**empty, **stored_buffers(model)}
    load_weights(model, tensors, WeightFiles(directory))
    return {name: tensor.detach() for name, tensor in tensors.items()}


def test_files_hold_one_tensor_per_expert(directory: Path) -> None:
    names = WeightFiles(directory).file_of
    assert {
        EXPERT.format(e, part) for e in range(8) for part in ("gate_proj", "up_proj", "down_proj")
    } <= set(names)
    assert FUSED not in names and FUSED in own(reference(directory))


def test_loading_equals_transformers(directory: Path) -> None:
    expected, found = own(reference(directory)), loaded(directory)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    buffers = stored_buffers(reference(directory))
    assert ("deepseek_v3" in str(directory)) == bool(buffers)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_rank_reads_its_own_part_only(
    directory: Path, rank: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the experts, or some rows or columns of each."""
    model, whole = build_causal_lm(directory, "sdpa"), own(reference(directory))
    files, read = WeightFiles(directory), dict[str, int]()

    def noted(name: str, part: tuple[slice, ...]) -> torch.Tensor:
        tensor = WeightFiles.read(files, name, part)
        read[name] = tensor.numel()
        return tensor

    monkeypatch.setattr(files, "read", noted)
    with rank_of_two(rank) as mesh:
        tensors = {
            name: nn.Parameter(
                distribute_tensor(
                    torch.zeros_like(x), mesh, [Shard(min(dim, x.ndim - 1))], src_data_rank=None
                )
            )
            for name, x in whole.items()
        }
        load_weights(model, tensors, files)
        for name, tensor in tensors.items():
            shard = shard_of(tensor)
            assert torch.equal(shard.local, whole[name][shard.part()]), name
    experts = {name: count for name, count in read.items() if ".experts." in name}
    numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in experts}
    assert numbers == set(range(8) if dim else range(4 * rank, 4 * rank + 4))
    everything = sum(x.numel() for name, x in whole.items() if ".experts." in name)
    assert sum(experts.values()) == everything // 2


def test_experts_of_other_shapes_are_refused(copy: Path) -> None:
    """Also where a part of each is read, which would fit."""
    file, name = copy / "model.safetensors", EXPERT.format(3, "up_proj")
    tensors = load_file(file)
    save_file({**tensors, name: torch.cat([tensors[name]] * 2)}, file)
    model, whole = build_causal_lm(copy, "sdpa"), own(build_causal_lm(copy, "sdpa"))
    with rank_of_two(0) as mesh, pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts"):
        x = torch.zeros(whole[FUSED].shape)
        sharded = nn.Parameter(distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None))
        load_weights(model, {FUSED: sharded}, WeightFiles(copy))


def test_published_again_bit_for_bit(directory: Path) -> None:
    model, files = reference(directory), load_file(directory / "model.safetensors")
    publish = Publisher(model)
    again = {n: t for name, tensor in own(model).items() for n, t in publish(name, tensor.detach())}
    assert again.keys() == files.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in files.items())
    assert published_shapes(model, own(model)) == {name: tuple(t.shape) for name, t in files.items()}


def test_files_with_fused_experts_are_read_too(directory: Path, copy: Path) -> None:
    fused = {name: tensor.detach().contiguous() for name, tensor in own(reference(directory)).items()}
    save_file(fused, copy / "model.safetensors")
    found = loaded(copy)
    assert all(torch.equal(found[name], tensor) for name, tensor in fused.items())


def test_weights_of_a_narrower_type_are_widened(directory: Path, copy: Path) -> None:
    reference(directory).bfloat16().save_pretrained(copy)
    expected, found = own(reference(copy)), loaded(copy)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("lost", ["all parts", "one part"])
def test_a_missing_expert(copy: Path, lost: str) -> None:
    parts = ("gate_proj", "up_proj", "down_proj") if lost == "all parts" else ("up_proj",)
    gone = {EXPERT.format(3, part) for part in parts}
    file = copy / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name not in gone}, file)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts"):
        loaded(copy)


def test_a_quantized_model_is_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match="is quantized"):
        build_causal_lm(copy, "sdpa")


def test_what_nothing_needs_is_left_out(directory: Path) -> None:
    model = build_causal_lm(directory, "sdpa")
    names = [*WeightFiles(directory).file_of, "model.layers.61.mlp.experts.0.up_proj.weight", "other"]
    plan = conversions(model, own(model), names)
    assert {conversion.target for conversion in plan} == own(model).keys()
