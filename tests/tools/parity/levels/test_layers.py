from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_tensors

from isotrain.engine.engine import LossScale, TrainingEngine
from isotrain.errors import DataError
from isotrain.tools.parity.levels.level import Level
from isotrain.trainers import build
from isotrain.trainers.launch import train_supervised
from support import run_cli, tiny_recipe, write_recipe
from traced_runs import layers_level

pytestmark = pytest.mark.heavy

Tamper = Callable[[TrainingEngine], None]
FIRST = "step-000001-rank-00000.safetensors"


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    """Matrices this small are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(tiny: Path, output: Path, device_type: str = "cpu", steps: int = 2, **sections: Any) -> Path:
    sections = {"trainer": {"steps": steps}, "observe": {"layer_trace": 2, "loggers": []}, **sections}
    # Without clipping: a common factor of all gradients would be gone.
    sections["optimizer"] = {"lr": 1e-3, "max_grad_norm": 0.0, **sections.get("optimizer", {})}
    train_supervised(tiny_recipe(tiny, output, device_type, **sections), "")
    return output


@pytest.fixture(scope="module")
def reference(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny, tmp_path_factory.mktemp("layers") / "reference")


@pytest.fixture
def tampered(
    tiny: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Level]:
    """The level of the reference against a run whose engine was changed."""

    def run(tamper: Tamper, **sections: Any) -> Level:
        build_task = build.build_task

        def changed(*arguments: Any, **options: Any) -> Any:
            engine, task = build_task(*arguments, **options)
            tamper(engine)
            return engine, task

        monkeypatch.setattr(build, "build_task", changed)
        return layers_level(reference, train(tiny, tmp_path / "run", **sections), dtype="float32")

    return run


def last_digits(tiny: Path, out: Path) -> Path:
    """The model with every weight moved to a neighbouring number."""
    shutil.copytree(tiny, out)
    file = out / "model" / "model.safetensors"
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.nextafter(w, torch.where(torch.rand(w.shape, generator=draw) < 0.5, -9.0, 9.0))
        for name, w in load_file(file).items()
    }
    save_tensors(tensors, file, metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("fused", ["off", "on"])
def test_two_devices_agree(tiny: Path, reference: Path, tmp_path: Path, fused: str) -> None:
    run = train(tiny, tmp_path / "run", "npu", model={"fused": fused})
    level = layers_level(reference, run, dtype="float32")
    assert level.name == "P1" and level.state == "same" and not level.causes
    assert level.words.startswith("activations, gradients and updates of 2 forced steps agree in all ")
    layers, shares = level.evidence["layers"], []
    assert level.evidence["first"] is None
    for layer in layers:
        shares.append(layer["error"] / layer["limit"])
    assert max(shares) < 0.25, "honest pairs are far from the limits"
    assert (max(shares) > 0) == (fused == "on")
    kinds = [check.name for check in level.checks]
    order = ("weights", "activations", "loss", "gradients", "parameter gradients", "updates")
    assert kinds == [f"{kind}: error" for kind in order]
    assert all(check.passed for check in level.checks)
    json.dumps(level.evidence, allow_nan=False)


def test_gradients_are_recorded_without_the_loss_scale(
    tiny: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs in float16 with other scales are the same, also beside float32."""
    a = train(tiny, tmp_path / "a", model={"dtype": "float16"})
    monkeypatch.setattr("isotrain.engine.build.LossScale", lambda: LossScale(2.0**12))
    b = train(tiny, tmp_path / "b", "npu", model={"dtype": "float16", "fused": "on"})
    assert layers_level(a, b, dtype="float16").state == "same"
    assert layers_level(reference, a, dtype="float16").state == "same"


def test_compares_bfloat16_and_adapters(tiny: Path, tmp_path: Path) -> None:
    model: dict[str, Any] = {"dtype": "bfloat16", "lora": {"rank": 4}}
    a = train(tiny, tmp_path / "a", model=model)
    b = train(tiny, tmp_path / "b", "npu", model={**model, "fused": "on"})
    assert layers_level(a, b, dtype="bfloat16").state == "same"
    faster = train(tiny, tmp_path / "c", "npu", model={**model, "fused": "on"}, optimizer={"lr": 1.01e-3})
    level = layers_level(a, faster, dtype="bfloat16")
    assert level.state == "different"
    # Directions of updates say little in so few digits; their size does.
    assert level.evidence["first"]["kind"] == "update" and level.evidence["first"]["name"] == "all of them"
    assert level.causes == ("the optimizer: learning rate, moments, weight decay, by a factor of 1.010",)


def test_noise_makes_limits_of_its_own(tiny: Path, reference: Path, tmp_path: Path) -> None:
    noise = train(last_digits(tiny, tmp_path / "model"), tmp_path / "noise")
    run = train(tiny, tmp_path / "run", "npu", model={"fused": "on"})
    plain = layers_level(reference, run, dtype="float32")
    level = layers_level(reference, run, [noise], dtype="float32")
    assert plain.state == level.state == layers_level(reference, noise, dtype="float32").state == "same"
    limits, others = ([layer["limit"] for layer in one.evidence["layers"]] for one in (level, plain))
    assert np.median(np.divide(limits, others)) < 0.8


def test_weights_that_were_loaded_otherwise_are_named(tampered: Callable[..., Level]) -> None:
    """In whatever type the layers compute: weights are kept in float32."""

    def tamper(engine: TrainingEngine) -> None:
        with torch.no_grad():
            engine.model.pretrained.get_parameter("model.layers.1.self_attn.q_proj.weight").mul_(1.004)

    level = tampered(tamper)
    assert level.state == "different"
    name = "model.layers.1.self_attn.q_proj.weight"
    assert level.words.startswith(f"the first difference is in the weights of {name} at step 1 (4.0e-03 ")
    assert level.causes[0] == (
        f"the weights of {name} that the step began with: how they were loaded or converted"
    )


def test_a_wrong_epsilon_is_named(tampered: Callable[..., Level]) -> None:
    def tamper(engine: TrainingEngine) -> None:
        engine.model.pretrained.get_submodule("model.layers.1.input_layernorm").variance_epsilon = 1e-5

    level = tampered(tamper)
    assert level.state == "different"
    first = level.evidence["first"]
    assert (first["kind"], first["name"], first["step"]) == (
        "activation",
        "model.layers.1.input_layernorm",
        1,
    )
    assert level.words.startswith(
        "the first difference is in the activations of model.layers.1.input_layernorm at step 1 ("
    )
    constant, layer, between = level.causes
    assert "the norm's epsilon is" in constant
    assert layer == (
        "layer model.layers.1.input_layernorm: its weights, its constants (epsilon, scale) or its kernel"
    )
    assert between == "what is computed between model.layers.0 and it"


def test_a_scaled_gradient_gives_the_factor(tampered: Callable[..., Level]) -> None:
    def tamper(engine: TrainingEngine) -> None:
        for parameter in engine.trained.values():
            parameter.register_hook(lambda gradient: gradient * 1.5)

    level = tampered(tamper)
    assert level.evidence["first"]["kind"] == "parameter gradient"
    assert level.causes == ("gradient scaling (accumulation, ranks, clipping), by a factor of 1.500",)
    assert level.words.endswith("each is 1.500 times the reference's")


def test_one_wrong_weight_gradient_is_no_common_factor(tampered: Callable[..., Level]) -> None:
    def tamper(engine: TrainingEngine) -> None:
        weight = engine.model.pretrained.get_parameter("model.layers.0.mlp.up_proj.weight")
        weight.register_hook(lambda gradient: gradient * 1.5)

    level = tampered(tamper)
    assert level.evidence["first"]["name"] == "model.layers.0.mlp.up_proj.weight"
    assert level.causes[0] == "the backward of model.layers.0.mlp.up_proj: its weights' gradient"


def test_another_learning_rate_is_the_optimizers(tiny: Path, reference: Path, tmp_path: Path) -> None:
    level = layers_level(reference, train(tiny, tmp_path / "run", optimizer={"lr": 1.01e-3}), dtype="float32")
    assert level.evidence["first"]["kind"] == "update" and level.evidence["first"]["step"] == 1
    assert level.causes == ("the optimizer: learning rate, moments, weight decay, by a factor of 1.010",)


def test_a_wrong_backward_is_between_two_layers(tampered: Callable[..., Level]) -> None:
    def hook(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * 1.001)

    def tamper(engine: TrainingEngine) -> None:
        engine.model.pretrained.get_submodule("model.layers.1.self_attn.o_proj").register_forward_hook(hook)

    level = tampered(tamper)
    assert level.evidence["first"]["kind"] == "gradient"
    (cause,) = level.causes
    assert cause.startswith("the backward of model.layers.1") and cause.endswith("self_attn.o_proj")


def test_finds_a_scaled_loss(tampered: Callable[..., Level]) -> None:
    def tamper(engine: TrainingEngine) -> None:
        def hook(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
            return output[0] * 1.02, output[1]

        engine.model.register_forward_hook(hook)

    level = tampered(tamper)
    assert level.evidence["first"]["kind"] == "loss"
    assert level.causes == ("the loss: its mask, its scale or its aggregation",)


def test_finds_a_shifted_mask(tampered: Callable[..., Level]) -> None:
    def shift(module: torch.nn.Module, arguments: tuple[Any, ...]) -> Any:
        tokens, positions, lengths, predict_N, targets_N, *rest = arguments
        return tokens, positions, lengths, predict_N.roll(1), targets_N.roll(1), *rest

    level = tampered(lambda engine: engine.model.register_forward_pre_hook(shift) and None)
    assert level.causes == ("the loss mask",) and "at step 1" not in level.words
    assert level.words == "from step 1 on the candidate takes its loss on other tokens than the reference"
    assert level.evidence["layers"] == [] and level.evidence["first"]["kind"] == "data"


def test_finds_other_data(tampered: Callable[..., Level]) -> None:
    level = tampered(lambda engine: None, data={"batch_size": 4})
    assert level.state == "different" and level.causes == ("data order, chat template or tokenizer",)


def test_a_schedule_shows_in_the_second_step(
    tiny: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = build.make_schedule

    def changed(*arguments: Any) -> Callable[[int], float]:
        right = make(*arguments)
        return lambda step: right(step) * (1.05 if step > 1 else 1.0)

    monkeypatch.setattr(build, "make_schedule", changed)
    level = layers_level(reference, train(tiny, tmp_path / "run"), dtype="float32")
    assert level.evidence["first"]["step"] == 2
    assert level.causes[0] == "optimizer state or schedule" and "1.050" in level.causes[1]


def test_a_resumed_run_keeps_what_its_start_recorded(tiny: Path, tmp_path: Path) -> None:
    run = train(tiny, tmp_path / "run", steps=1)
    before = {file.name: file.read_bytes() for file in (run / "layer_trace").iterdir()}
    train(tiny, run, steps=2)
    assert {file.name: file.read_bytes() for file in (run / "layer_trace").iterdir()} == before
    assert list(before) == [FIRST]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compares_two_ranks_on_two_devices(tiny: Path, tmp_path: Path, dtype: str) -> None:
    for device_type in ("cpu", "npu"):
        recipe = tiny_recipe(
            tiny,
            tmp_path / device_type,
            device_type,
            model={"dtype": dtype, "fused": "auto", "gradient_checkpointing": True},
            device={"ranks": 2},
            data={"tokens_per_micro_batch": 128},
            trainer={"steps": 2},
            observe={"layer_trace": 2, "loggers": []},
        )
        run_cli("train", str(write_recipe(recipe, tmp_path / f"{device_type}.yaml")))
    level = layers_level(tmp_path / "cpu", tmp_path / "npu", dtype=dtype)
    assert level.state == "same", level.words
    assert len(list((tmp_path / "npu" / "layer_trace").iterdir())) == 4


@pytest.fixture
def copied(reference: Path, tmp_path: Path) -> Path:
    shutil.copytree(reference / "layer_trace", tmp_path / "copy" / "layer_trace")
    return tmp_path / "copy"


def rewrite(run: Path, change: Callable[[dict[str, Any], dict[str, str]], None]) -> None:
    path = run / "layer_trace" / FIRST
    with safe_open(path, "np") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def test_layer_traces_alone_are_enough(reference: Path, copied: Path) -> None:
    assert layers_level(reference, copied, dtype="float32").state == "same"


def test_without_layer_traces_it_is_not_run(reference: Path, copied: Path, tmp_path: Path) -> None:
    level = layers_level(reference, tmp_path / "nothing", dtype="float32")
    assert level.state == "not run" and "observe.layer_trace=2" in level.words
    (copied / "layer_trace" / FIRST).unlink()
    (copied / "layer_trace" / "step-000002-rank-00000.safetensors").rename(copied / "layer_trace" / FIRST)
    rewrite(copied, lambda tensors, metadata: metadata.update(ranks="2"))
    assert layers_level(reference, copied, dtype="float32").state == "not run", "the other rank is missing"


def test_other_numbers_of_ranks(reference: Path, copied: Path) -> None:
    for file in sorted((copied / "layer_trace").iterdir()):
        if file.name != FIRST:
            file.unlink()
    rewrite(copied, lambda tensors, metadata: metadata.update(ranks="2"))
    shutil.copy(
        copied / "layer_trace" / FIRST, copied / "layer_trace" / FIRST.replace("rank-00000", "rank-00001")
    )
    level = layers_level(reference, copied, dtype="float32")
    assert level.state == "not run" and level.words.startswith("1 and 2 ranks")
    assert layers_level(copied, copied, dtype="float32").state == "same"


def test_what_is_no_number_differs(reference: Path, copied: Path) -> None:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        tensors["gradient/sketch"][3, 0, 0] = np.nan

    rewrite(copied, change)
    level = layers_level(reference, copied, dtype="float32")
    assert level.state == "different" and "no numbers" in level.words
    json.dumps(level.evidence, allow_nan=False)
    # A noise run like that allows nothing.
    assert layers_level(reference, copied, [copied], dtype="float32").state == "different"


def test_a_step_that_trains_nothing_shows_nothing(copied: Path) -> None:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        for name in ("parameter gradient/norm", "parameter gradient/sketch"):
            tensors[name][:] = 0

    for file in sorted((copied / "layer_trace").iterdir()):
        if file.name != FIRST:
            file.unlink()
    rewrite(copied, change)
    level = layers_level(copied, copied, dtype="float32")
    assert level.state == "cannot tell" and level.words.startswith("no recorded step has a gradient")


def test_sizes_beyond_all_numbers(reference: Path, copied: Path) -> None:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        for name in ("update/norm", "weight/norm", "gradient/norm"):
            tensors[name][:] = [1e300, np.inf, *tensors[name][2:]]

    rewrite(copied, change)
    for runs in ((reference, copied), (copied, reference)):
        level = layers_level(*runs, dtype="float32")
        assert level.state == "different"
        json.dumps(level.evidence, allow_nan=False)


def change_shape(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    tensors["activation/sketch"] = tensors["activation/sketch"][:-1]


def change_type(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    tensors["update/norm"] = tensors["update/norm"].astype(np.float32)


def drop(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    del tensors["weight/norm"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_shape, "which is not a layer trace's"),
        (change_type, "which is not a layer trace's"),
        (drop, "no 'weight/norm'"),
        (lambda tensors, metadata: metadata.clear(), "'format' of its metadata"),
        (lambda tensors, metadata: metadata.update(format="2"), "another version"),
        (lambda tensors, metadata: metadata.update(names="[" * 100_000), "'names' of its metadata"),
        (lambda tensors, metadata: metadata.update(names='{"activation": [1]}'), "names of activations"),
        (lambda tensors, metadata: metadata.update(digests="{}"), "digests"),
    ],
)
def test_refuses_hostile_files(reference: Path, copied: Path, change: Any, message: str) -> None:
    rewrite(copied, change)
    with pytest.raises(DataError, match=message):
        layers_level(reference, copied, dtype="float32")


def test_reads_nothing_for_a_claim_of_endless_ranks(reference: Path, copied: Path) -> None:
    rewrite(copied, lambda tensors, metadata: metadata.update(ranks=str(10**10)))
    assert layers_level(reference, copied, dtype="float32").state == "not run"


def test_files_that_are_none(reference: Path, copied: Path, tmp_path: Path) -> None:
    path = copied / "layer_trace" / FIRST
    whole = path.read_bytes()
    for content in (b"", whole[:1000], whole[:-8], b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(DataError, match="copy it again"):
            layers_level(reference, copied, dtype="float32")
    path.unlink()
    path.symlink_to(reference / "layer_trace" / FIRST)
    with pytest.raises(DataError, match="leads out"):
        layers_level(reference, copied, dtype="float32")


def test_limits_need_a_known_type(reference: Path) -> None:
    with pytest.raises(DataError, match="float32, float16, bfloat16"):
        layers_level(reference, reference, dtype="float64")


def test_attention_that_shares_no_prompts_reads_other_tokens(tiny: Path, tmp_path: Path) -> None:
    """Not a difference of the data: the level cannot be preference, and says what to do."""

    def pairs(name: str, attention: str) -> Path:
        return train(
            tiny,
            tmp_path / name,
            model={"attention": attention},
            algorithm={"name": "dpo"},
            data={"train": str(tiny / "pairs.jsonl"), "max_length": 64},
        )

    level = layers_level(pairs("a", "sdpa"), pairs("b", "padded"), dtype="float32")
    assert level.state == "not run" and "(sdpa and padded)" in level.words
