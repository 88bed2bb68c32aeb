from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from isotrain.algorithms.sft import sft_loss
from isotrain.data.items import Sample
from isotrain.data.packing import pack
from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.world import join_world
from isotrain.errors import ModelError
from isotrain.models.load import build_causal_lm
from isotrain.models.lora import (
    adapters_off,
    add_adapters,
    base_name,
    initialise_adapters,
    is_adapter,
    lora_config,
)
from isotrain.models.weights import shard_of
from isotrain.recipe.schema import ModelSection, OptimizerSection
from support import rank_of_two

LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
BATCH = pack([Sample(np.arange(3, 12, dtype=np.int32), np.ones(9, np.bool_))])


@contextmanager
def build(tiny: Path, device_type: str, *, dtype: str = "float32", **lora: Any) -> Iterator[TrainingEngine]:
    device = choose_device(device_type)
    section = ModelSection.model_validate({"path": str(tiny / "model"), "dtype": dtype, "lora": lora})
    with join_world(device) as world:
        yield build_engine(section, OptimizerSection(max_grad_norm=0), device=device, world=world, seed=7)


def weights(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    return {name: shard_of(p).local.detach().cpu().clone() for name, p in engine.model.named_parameters()}


def hidden_states(engine: TrainingEngine) -> torch.Tensor:
    batch = BATCH.to(engine.world.device)
    place = (batch.tokens_T, batch.positions_T, batch.lengths, batch.predict_N, batch.targets_N)
    hidden_ND: torch.Tensor = engine.model(*place, lambda head: head.hidden_ND)
    return hidden_ND.detach()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fresh_adapters_leave_the_model_as_it_is(tiny: Path, device_type: str, dtype: str) -> None:
    with build(tiny, device_type, dtype=dtype) as engine:
        base = hidden_states(engine)
    with build(tiny, device_type, dtype=dtype, rank=4) as engine:
        assert torch.equal(hidden_states(engine), base)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_can_be_switched_off(tiny: Path, device_type: str, dtype: str) -> None:
    with build(tiny, device_type, dtype=dtype, rank=4) as engine:
        base = hidden_states(engine)
        for _ in range(2):
            engine.step([BATCH], sft_loss, lr=1e-2)
        adapted = hidden_states(engine)
        with pytest.raises(KeyError), adapters_off(engine.model), adapters_off(engine.model):
            assert torch.equal(hidden_states(engine), base)
            raise KeyError
        assert torch.equal(hidden_states(engine), adapted) and not torch.equal(adapted, base)
        before = weights(engine)
        engine.step([BATCH], sft_loss, lr=1e-2)
        after = weights(engine)
        assert all(torch.equal(before[name], after[name]) != is_adapter(name) for name in before)


def test_only_adapters_train(tiny: Path, device_type: str) -> None:
    with build(tiny, device_type, rank=4) as engine:
        assert engine.trained and all(is_adapter(name) for name in engine.trained)
        rows = sum(64 + shape for shape in (64, 32, 32, 64, 192, 192, 192))  # inputs and outputs of a layer
        assert engine.parameter_counts[1] == 2 * 4 * rows
        before = weights(engine)
        for _ in range(2):  # A has no gradient while B is zero
            assert engine.step([BATCH], sft_loss, lr=1e-2).applied
        after = weights(engine)
        for name in before:
            assert torch.equal(before[name], after[name]) != is_adapter(name), name


def test_adapters_are_float32_and_alone_train(tiny: Path, device_type: str) -> None:
    with build(tiny, device_type, dtype="bfloat16", rank=4) as engine:
        for name, parameter in engine.model.named_parameters():
            expected = torch.float32 if is_adapter(name) else torch.bfloat16
            assert parameter.dtype == expected, name
            assert parameter.requires_grad == is_adapter(name), name
        assert math.isfinite(engine.step([BATCH], sft_loss, lr=1e-2).loss)


def test_outputs_are_scaled_by_alpha_over_rank(tiny: Path, device_type: str) -> None:
    with build(tiny, device_type, rank=4, alpha=10, targets=["down_proj"]) as engine:
        layer = engine.model.pretrained.base_model.layers[1].mlp.down_proj
        adapters = [shard_of(layer.get_parameter(f"lora_{x}.default.weight")).local for x in "AB"]
        base = shard_of(layer.base_layer.weight).local
        with torch.no_grad():
            adapters[1].normal_()
            merged = base + 2.5 * adapters[1] @ adapters[0]
            adapted = hidden_states(engine)
            base.copy_(merged)
            adapters[1].zero_()
        torch.testing.assert_close(adapted, hidden_states(engine), rtol=0, atol=1e-5)


def adapted(directory: Path, targets: str | list[str]) -> set[str]:
    """The kinds of modules that carry adapters."""
    model = build_causal_lm(directory, "sdpa")
    add_adapters(model, lora_config(4, 8, targets, 0.0), torch.float32)
    assert all(p.is_meta for p in model.parameters())
    return {
        name.split(".lora_")[0].rsplit(".")[-1] for name, _ in model.named_parameters() if is_adapter(name)
    }


def test_targets_choose_layers_and_never_the_head(tiny: Path, tmp_path: Path) -> None:
    assert adapted(tiny / "model", "all-linear") == LINEAR
    assert adapted(tiny / "model", ["q_proj", "v_proj"]) == {"q_proj", "v_proj"}
    make_tiny(tmp_path, train_rows=1, validation_rows=1, tie_word_embeddings=False)
    assert adapted(tmp_path / "model", "all-linear") == LINEAR, "the head is left out, tied or not"


def test_refuses_an_unknown_target(tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.lora\.targets: .*q_prj"):
        adapted(tiny / "model", ["q_prj"])


@pytest.mark.filterwarnings("ignore:Model has")
def test_the_head_cannot_be_a_target(tiny: Path) -> None:
    with pytest.raises(ModelError, match="lm_head"):
        adapted(tiny / "model", ["q_proj", "lm_head"])


def test_one_unknown_target_of_several(tiny: Path) -> None:
    with pytest.raises(ModelError, match="v_prj"):
        adapted(tiny / "model", ["q_proj", "v_prj"])


def test_names_of_adapters_and_of_the_layers_below_them() -> None:
    base, adapter = "layers.0.q_proj.base_layer.weight", "layers.0.q_proj.lora_A.default.weight"
    assert base_name(base) == "layers.0.q_proj.weight" and base_name("norm.weight") == "norm.weight"
    assert is_adapter(adapter) and not is_adapter(base)


def initialised(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    parameters = {name: nn.Parameter(torch.full(shape, torch.nan)) for name, shape in shapes.items()}
    initialise_adapters(parameters.items(), seed)
    return {name: p.detach() for name, p in parameters.items()}


def test_adapters_start_at_zero_with_uniform_inputs() -> None:
    shapes = {"a.lora_A.default.weight": (64, 100), "a.lora_B.default.weight": (30, 64)}
    down, up = initialised(shapes).values()
    assert torch.equal(up, torch.zeros(30, 64))
    # Uniform between -1/sqrt(inputs) and 1/sqrt(inputs).
    assert 0.099 < down.max() <= 0.1 and -0.1 <= down.min() < -0.099
    assert abs(down.mean()) < 0.003 and abs(down.std() - 0.1 / math.sqrt(3)) < 0.002


def test_initial_values_depend_on_name_and_seed_alone() -> None:
    first, second = "a.lora_A.default.weight", "b.lora_A.default.weight"
    torch.manual_seed(1)
    state = torch.get_rng_state()
    drawn = initialised({first: (4, 6), second: (4, 6)})
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not touched"
    assert not torch.equal(drawn[first], drawn[second])
    reverse = initialised({second: (4, 6), first: (4, 6)})
    assert all(torch.equal(drawn[name], reverse[name]) for name in drawn)
    assert not torch.equal(initialised({first: (4, 6)}, seed=1)[first], drawn[first])


def test_initial_values_do_not_depend_on_the_device(tiny: Path) -> None:
    found = []
    for device_type in ("cpu", "npu"):
        with build(tiny, device_type, rank=4) as engine:
            found.append({name: tensor for name, tensor in weights(engine).items() if is_adapter(name)})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 2 * 7 * 2
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


def test_initial_values_do_not_depend_on_the_split() -> None:
    name, parts = "a.lora_A.default.weight", []
    for rank in (0, 1):
        with rank_of_two(rank) as mesh:
            sharded = distribute_tensor(torch.zeros(5, 6), mesh, [Shard(0)], src_data_rank=None)
            parameter = nn.Parameter(sharded)
            initialise_adapters([(name, parameter)], seed=0)
            parts.append(shard_of(parameter).local.detach().clone())
    assert [len(part) for part in parts] == [3, 2]
    assert torch.equal(torch.cat(parts), initialised({name: (5, 6)})[name])
