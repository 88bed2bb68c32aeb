"""Mixtures of experts train as transformers' own forward and backward say."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mixture_ranks
import npusim
import pytest
import torch
from jobs import SAMPLES
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from isotrain.data.packing import pack
from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.world import join_world
from isotrain.errors import ModelError
from isotrain.models.experts import RouterBalance
from isotrain.models.lora import adapted_layers
from isotrain.recipe.schema import ModelSection, OptimizerSection
from isotrain.weights.send import full_weights

AUX = 0.3


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("qwen"), "qwen3_moe")


def make(out: Path, architecture: Any) -> Path:
    make_tiny(out, train_rows=1, validation_rows=1, architecture=architecture)
    return out / "model"


@contextmanager
def engine_of(directory: Path, device_type: str, **model: Any) -> Iterator[TrainingEngine]:
    section = ModelSection(path=str(directory), **{"dtype": "float32", "fused": "off", **model})
    device = choose_device(device_type)
    with join_world(device) as world:
        # Without clipping, and with a momentum of 0.5, the first moments are half of the gradients.
        optimizer = OptimizerSection(lr=1e-3, betas=(0.5, 0.9), max_grad_norm=0, weight_decay=0)
        yield build_engine(section, optimizer, device=device, world=world, seed=0)


def gradients(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(engine.model.prefix): 2 * engine.optimizer.state[parameter]["exp_avg"].cpu()
        for name, parameter in engine.trained.items()
    }


def reference(
    directory: Path, samples: list[Any], **options: Any
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Loss, its auxiliary part and gradients of transformers' own forward, over rows padded on the right."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    ids = [torch.from_numpy(sample.tokens_T).long() for sample in samples]
    masks = [torch.from_numpy(sample.mask_T) for sample in samples]
    labels = [torch.where(mask, tokens, -100) for tokens, mask in zip(ids, masks, strict=True)]
    real = pad_sequence([torch.ones_like(tokens) for tokens in ids], batch_first=True)
    output = model(
        input_ids=pad_sequence(ids, batch_first=True),
        attention_mask=real,
        labels=pad_sequence(labels, batch_first=True, padding_value=-100),
        **options,
    )
    loss, aux = output.loss, output.aux_loss if options else torch.zeros(())
    if options and bool((output.router_logits[0].sum(-1) - 1).abs().max() < 1e-4):
        # An older transformers takes the softmax of probabilities: once is right.
        config, balance = model.config, sys.modules[type(model).__module__].load_balancing_loss_func  # type: ignore[attr-defined]
        logits = tuple(probabilities.log() for probabilities in output.router_logits)
        once = balance(logits, config.num_experts, config.num_experts_per_tok, real)
        loss, aux = loss + config.router_aux_loss_coef * (once - aux), once
    loss.backward()
    return loss.item(), aux.item(), {name: p.grad for name, p in model.named_parameters()}


def check_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert any(".experts.gate_up_proj" in name and bool(g.any()) for name, g in found.items())


@pytest.mark.parametrize("attention", ["sdpa", "padded"])
def test_loss_and_gradients_are_those_of_transformers(
    directory: Path, device_type: str, attention: str
) -> None:
    loss, _, expected = reference(directory, SAMPLES)
    with engine_of(directory, device_type, attention=attention) as engine:
        result = engine.step([pack(SAMPLES)], lambda head, tokens: head.nll_share(tokens), 1e-3)
        found = gradients(engine)
    assert abs(result.loss - loss) < 1e-5
    check_gradients(found, expected)


def test_fused_experts_are_those_of_transformers(directory: Path) -> None:
    """Over the simulated device's grouped product, which has no derivative of its own."""
    loss, _, expected = reference(directory, SAMPLES)
    with engine_of(directory, "npu", fused="auto") as engine:
        assert engine.model.fused.operators[-1] == "experts"
        result = engine.step([pack(SAMPLES)], lambda head, tokens: head.nll_share(tokens), 1e-3)
        found = gradients(engine)
    assert abs(result.loss - loss) < 1e-5
    check_gradients(found, expected)


@pytest.mark.parametrize(("fused", "experts"), [("off", "auto"), ("auto", "eager")])
def test_experts_are_fused_only_if_asked(qwen: Path, fused: str, experts: str) -> None:
    with engine_of(qwen, "npu", fused=fused, experts=experts) as engine:
        assert "experts" not in engine.model.fused.operators
        assert engine.model.pretrained.config._experts_implementation == "eager"


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_every_implementation_of_the_experts_is_the_same(qwen: Path, experts: str) -> None:
    loss, _, expected = reference(qwen, SAMPLES)
    with engine_of(qwen, "cpu", experts=experts) as engine:
        assert engine.model.pretrained.config._experts_implementation == experts
        result = engine.step([pack(SAMPLES)], lambda head, tokens: head.nll_share(tokens), 1e-3)
        found = gradients(engine)
    assert abs(result.loss - loss) < 1e-5
    check_gradients(found, expected)


@pytest.mark.parametrize("attention", ["sdpa", "padded"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_auxiliary_loss_is_that_of_transformers(
    qwen: Path, device_type: str, attention: str, checkpointing: bool
) -> None:
    loss, aux, expected = reference(qwen, SAMPLES, output_router_logits=True)
    coefficient = AutoModelForCausalLM.from_pretrained(qwen).config.router_aux_loss_coef
    plain, _, without = reference(qwen, SAMPLES)
    assert math.isclose(loss, plain + coefficient * aux, rel_tol=1e-6) and aux > 1
    options = {"attention": attention, "gradient_checkpointing": checkpointing}
    with engine_of(qwen, device_type, router_aux_loss=coefficient, **options) as engine:
        result = engine.step([pack(SAMPLES)], lambda head, tokens: head.nll_share(tokens), 1e-3)
        found = gradients(engine)
    assert abs(result.loss - loss) < 1e-5
    assert result.router_aux_loss is not None and abs(result.router_aux_loss - aux) < 1e-5
    check_gradients(found, expected)
    # It does something: the routers' gradients without it are others.
    gate = "model.layers.1.mlp.gate.weight"
    assert not torch.allclose(found[gate], without[gate], rtol=1e-2)


def test_micro_batches_count_by_their_tokens(qwen: Path) -> None:
    parts = [SAMPLES[:2], SAMPLES[2:]]
    tokens = [sum(map(len, part)) for part in parts]
    expected = sum(
        n * reference(qwen, part, output_router_logits=True)[1] for n, part in zip(tokens, parts, strict=True)
    ) / sum(tokens)
    plain = reference(qwen, SAMPLES)[0]
    with engine_of(qwen, "cpu", router_aux_loss=AUX) as engine:
        batches = [pack(parts[0]), pack(parts[1]), pack([])]  # the last one has no work and counts nothing
        result = engine.step(batches, lambda head, tokens: head.nll_share(tokens), 1e-3)
    assert result.router_aux_loss is not None
    assert abs(result.router_aux_loss - expected) < 1e-5
    assert abs(result.loss - (plain + AUX * expected)) < 1e-5


def test_evaluation_has_no_auxiliary_loss(qwen: Path) -> None:
    with engine_of(qwen, "cpu", router_aux_loss=AUX) as engine:
        found = engine.evaluate([[pack(SAMPLES)]], lambda head, tokens: head.nll_share(tokens))
    assert abs(found - reference(qwen, SAMPLES)[0]) < 1e-5


def test_probabilities_under_the_name_of_logits(qwen: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(qwen)
    logits = tuple(3 * torch.randn(40, 8, generator=torch.Generator().manual_seed(i)) for i in range(2))
    expected = RouterBalance(model, AUX)(logits)
    torch.testing.assert_close(RouterBalance(model, AUX)(tuple(x.softmax(-1) for x in logits)), expected)


def test_a_family_without_the_loss_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelError, match=r"model\.router_aux_loss: .* 'deepseek_v3'; remove it"),
        engine_of(make(tmp_path, "deepseek_v3"), "cpu", router_aux_loss=AUX),
    ):
        pass


def test_a_token_costs_the_experts_it_is_sent_to(qwen: Path) -> None:
    with engine_of(qwen, "cpu") as engine:
        sizes = {name: p.numel() for name, p in engine.model.named_parameters()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        assert engine.parameter_counts == (sum(sizes.values()) - experts * 6 // 8,) * 2


@pytest.mark.parametrize(
    ("on", "ranks"),
    [
        ("npu", 2),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("cpu", 1), ("cpu", 2), ("npu", 1))),
    ],
)
def test_streamed_weights_are_in_published_form(directory: Path, tmp_path: Path, on: str, ranks: int) -> None:
    """What engines are sent, from the trained model on one rank and on two, is what the files would hold."""
    command = [sys.executable, mixture_ranks.__file__, on, str(directory), str(tmp_path)]
    npusim.run_ranks(command, ranks, timeout=240)
    base = load_file(directory / "model.safetensors")
    for rank in range(ranks):
        streamed = load_file(tmp_path / f"{rank}.safetensors")
        assert {name: t.shape for name, t in streamed.items()} == {name: t.shape for name, t in base.items()}
        assert all(torch.equal(streamed[name], tensor) for name, tensor in base.items())


@pytest.mark.parametrize(
    ("kind", "targets", "adapted"),
    [
        ("qwen3_moe", "all-linear", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("qwen3_moe", ["v_proj"], {"v_proj"}),
        ("deepseek_v3", "all-linear", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
    ],
)
def test_adapters_of_a_mixture_go_to_attention(
    tmp_path: Path, kind: str, targets: Any, adapted: set[str]
) -> None:
    with engine_of(make(tmp_path, kind), "cpu", lora={"rank": 2, "targets": targets}) as engine:
        assert adapted_layers(engine.trained) == adapted
        before = {name: tensor.clone() for name, tensor in full_weights(engine, torch.float32)}
        result = engine.step([pack(SAMPLES)], lambda head, tokens: head.nll_share(tokens), 1e-2)
        engine.step([pack(SAMPLES)], lambda head, tokens: head.nll_share(tokens), 1e-2)
        after = dict(full_weights(engine, torch.float32))
    assert abs(result.loss - reference(tmp_path / "model", SAMPLES)[0]) < 1e-5
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == adapted


@pytest.mark.parametrize(
    ("kind", "targets"), [("qwen3_moe", ["down_proj"]), ("deepseek_v3", ["gate_proj", "up_proj"])]
)
def test_adapters_on_experts_are_refused(tmp_path: Path, kind: str, targets: list[str]) -> None:
    with (
        pytest.raises(ModelError, match=r"model\.lora\.targets: .*; use some of: .*o_proj"),
        engine_of(make(tmp_path, kind), "cpu", lora={"rank": 2, "targets": targets}),
    ):
        pass
