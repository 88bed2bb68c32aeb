from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, PreTrainedModel

from isotrain.algorithms.sft import sft_loss
from isotrain.data.items import Sample
from isotrain.data.packing import PackedBatch, pack
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.engine import TrainingEngine, Work
from isotrain.engine.optimizer import make_optimizer
from isotrain.engine.world import World, join_world
from isotrain.errors import ModelError
from isotrain.models.packed import Backbone, TokenHead
from isotrain.models.weights import shard_of
from isotrain.recipe.schema import ModelSection, OptimizerSection

Build = Callable[..., TrainingEngine]


def sample(length: int, seed: int) -> Sample:
    draw = np.random.default_rng(seed)
    mask_T = draw.random(length) < 0.6
    mask_T[:2] = False, True
    return Sample(draw.integers(3, 500, length).astype(np.int32), mask_T)


SAMPLES = [sample(length, seed) for seed, length in enumerate((12, 5, 20, 9, 3))]
# Two micro-batches of unlike sizes.
BATCHES = [pack(SAMPLES[:2]), pack(SAMPLES[2:])]
LOSS_TOKENS = sum(int(s.mask_T.sum()) for s in SAMPLES)


@pytest.fixture
def world(device_type: str) -> Iterator[World]:
    with join_world(choose_device(device_type)) as world:
        yield world


@pytest.fixture
def build(tiny: Path, device_type: str, world: World) -> Build:
    def make(model: dict[str, Any] | None = None, **optimizer: Any) -> TrainingEngine:
        section = {"path": str(tiny / "model"), "dtype": "float32", "fused": "off", **(model or {})}
        return build_engine(
            ModelSection.model_validate(section),
            OptimizerSection.model_validate(optimizer),
            device=choose_device(device_type),
            world=world,
            seed=0,
        )

    return make


def weights(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(Backbone.prefix): shard_of(p).local.detach().cpu().clone()
        for name, p in engine.model.named_parameters()
    }


def difference(after: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: after[name] - before[name] for name in before}


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def plain(tiny: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    return model


def plain_loss(model: PreTrainedModel, samples: list[Sample]) -> torch.Tensor:
    """The mean negative log-likelihood, sample by sample, as one would write it at home."""
    total, count = torch.zeros(()), 0
    for one in samples:
        tokens_T = torch.from_numpy(one.tokens_T).long()
        bears_loss = torch.from_numpy(one.mask_T)[1:]
        logits = model(input_ids=tokens_T[None]).logits[0, :-1]
        total = total + F.cross_entropy(logits[bears_loss], tokens_T[1:][bears_loss], reduction="sum")
        count += int(bears_loss.sum())
    return total / count


def gradient_steps(engine: TrainingEngine) -> None:
    """With plain descent at a rate of one, the change of the weights is the gradient."""
    engine.optimizer = torch.optim.SGD(engine.trained.values(), lr=1.0)


def test_loss_and_gradient_equal_a_plain_loop(tiny: Path, build: Build) -> None:
    engine, model = build(max_grad_norm=0), plain(tiny)
    gradient_steps(engine)
    before = weights(engine)
    result = engine.step(BATCHES, sft_loss, lr=1.0)
    loss = plain_loss(model, SAMPLES)
    loss.backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm(gradient), rel=1e-5)
    assert result.metrics == {"loss_tokens": LOSS_TOKENS} and result.applied
    for name, change in difference(before, weights(engine)).items():
        torch.testing.assert_close(change, gradient[name], rtol=1e-4, atol=1e-6, msg=name)


def test_three_updates_equal_a_plain_loop(tiny: Path, build: Build) -> None:
    options = {"betas": (0.9, 0.95), "eps": 1e-8}
    engine, model = build(max_grad_norm=0.5, weight_decay=0.1, **options), plain(tiny)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1.0, **options)
    for lr in (1e-3, 2e-3, 5e-4):
        result = engine.step(BATCHES, sft_loss, lr)
        loss = plain_loss(model, SAMPLES)
        loss.backward()
        expected_norm = clip_grad_norm_(model.parameters(), 0.5).item()
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        adamw.zero_grad()
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert result.grad_norm == pytest.approx(expected_norm, rel=1e-4)
    for name, tensor in weights(engine).items():
        torch.testing.assert_close(tensor, model.get_parameter(name).detach(), rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize(("max_grad_norm", "clipped"), [(0.25, True), (1e6, False), (0, False)])
def test_clips_the_update_and_reports_the_norm_before(
    build: Build, max_grad_norm: float, clipped: bool
) -> None:
    engine = build(max_grad_norm=max_grad_norm)
    gradient_steps(engine)
    before = weights(engine)
    result = engine.step(BATCHES, sft_loss, lr=1.0)
    assert result.grad_norm > 0.5, "what is reported is the norm before clipping"
    change = norm(difference(weights(engine), before))
    assert change == pytest.approx(0.25 if clipped else result.grad_norm, rel=1e-4)


def test_clipping_keeps_the_direction(build: Build) -> None:
    changes = []
    for max_grad_norm in (0, 0.25):
        engine = build(max_grad_norm=max_grad_norm)
        gradient_steps(engine)
        before = weights(engine)
        engine.step(BATCHES, sft_loss, lr=1.0)
        changes.append(torch.cat([x.flatten() for x in difference(weights(engine), before).values()]))
    assert F.cosine_similarity(*changes, dim=0).item() == pytest.approx(1, abs=1e-5)


def no_loss(head: TokenHead, loss_tokens: int) -> torch.Tensor:
    return head.nll_share(loss_tokens) * 0


def test_weight_decay_leaves_vectors_alone(build: Build) -> None:
    engine = build(weight_decay=0.5)
    before = weights(engine)
    result = engine.step(BATCHES, no_loss, lr=0.1)
    assert result.grad_norm == 0 and result.applied
    for name, tensor in weights(engine).items():
        expected = before[name] * (0.95 if tensor.ndim == 2 else 1)
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=0, msg=name)
    assert any(tensor.ndim == 1 for tensor in before.values())


def test_only_matrices_are_decayed_and_only_trained_weights_optimised() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1, bias=False))
    model[2].requires_grad_(False)
    options: dict[str, Any] = {
        "betas": (0.8, 0.9),
        "eps": 1e-6,
        "weight_decay": 0.3,
        "fused": True,
    }
    decayed, kept = make_optimizer(model, **options).param_groups
    assert decayed["params"] == [model[0].weight] and decayed["weight_decay"] == 0.3
    assert kept["params"] == [model[0].bias, model[1].weight, model[1].bias] and kept["weight_decay"] == 0
    for group in (decayed, kept):
        assert (group["betas"], group["eps"], group["fused"]) == ((0.8, 0.9), 1e-6, True)
    assert len(make_optimizer(nn.Linear(2, 3, bias=False), **options).param_groups) == 1


def test_evaluation_is_the_mean_over_tokens(tiny: Path, build: Build) -> None:
    engine, model = build(), plain(tiny)
    before = weights(engine)
    # Steps of unlike sizes: a mean of the steps' means would be another number.
    found = engine.evaluate(iter([[BATCHES[0]], [BATCHES[1], pack([])]]), sft_loss)
    with torch.no_grad():
        expected = plain_loss(model, SAMPLES).item()
        of_steps = [plain_loss(model, part).item() for part in (SAMPLES[:2], SAMPLES[2:])]
    assert found == pytest.approx(expected, rel=1e-6)
    assert found != pytest.approx(sum(of_steps) / 2, rel=1e-4)
    assert all(p.grad is None for p in engine.trained.values())
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(engine).items())


def test_evaluation_between_steps_changes_nothing(build: Build) -> None:
    results = []
    for evaluates in (False, True):
        engine = build(lr=1e-3)
        for _ in range(2):
            engine.step(BATCHES, sft_loss, lr=1e-3)
            if evaluates:
                engine.evaluate([BATCHES], sft_loss)
        results.append(weights(engine))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_dropout_is_for_training_only(build: Build) -> None:
    engine = build({"lora": {"rank": 4, "dropout": 0.5}})
    for _ in range(2):  # away from adapters that add nothing
        engine.step(BATCHES, sft_loss, lr=0.01)
    first, second = (engine.evaluate([BATCHES], sft_loss) for _ in range(2))
    assert first == second
    first, second = (engine.step(BATCHES, sft_loss, lr=0.0).loss for _ in range(2))
    assert first != second


def nan_loss(head: TokenHead, loss_tokens: int) -> torch.Tensor:
    return head.nll_share(loss_tokens) * math.nan


def nan_gradient(head: TokenHead, loss_tokens: int) -> torch.Tensor:
    """A finite loss whose gradient is not: the root of zero."""
    return head.nll_share(loss_tokens) + (head.hidden_ND.sum() * 0).sqrt()


def infinite_loss(head: TokenHead, loss_tokens: int) -> torch.Tensor:
    return head.nll_share(loss_tokens) + math.inf


@pytest.mark.parametrize("loss", [nan_loss, nan_gradient, infinite_loss])
def test_what_is_not_finite_leaves_everything_as_it_was(
    build: Build, loss: Callable[[TokenHead, int], torch.Tensor]
) -> None:
    engine, untouched = build(), build()
    engine.step(BATCHES, sft_loss, lr=1e-3)
    untouched.step(BATCHES, sft_loss, lr=1e-3)
    before = weights(engine)
    result = engine.step(BATCHES, loss, lr=1e-3)
    assert not result.applied
    assert not (math.isfinite(result.loss) and math.isfinite(result.grad_norm))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(engine).items())
    # Neither moments nor gradients remember it.
    assert engine.step(BATCHES, sft_loss, 1e-3) == untouched.step(BATCHES, sft_loss, 1e-3)
    expected = weights(untouched)
    assert all(torch.equal(expected[name], tensor) for name, tensor in weights(engine).items())


def test_an_empty_micro_batch_adds_nothing(build: Build) -> None:
    results = []
    for batches in (BATCHES, [*BATCHES, pack([])], [pack([]), *BATCHES]):
        engine = build()
        results.append((engine.step(batches, sft_loss, lr=1e-3), weights(engine)))
    for result, tensors in results[1:]:
        assert result == results[0][0]
        assert all(torch.equal(results[0][1][name], tensor) for name, tensor in tensors.items())


def test_micro_batches_do_not_change_the_step(build: Build) -> None:
    splits: list[list[PackedBatch]] = [[pack(SAMPLES)], BATCHES, [pack([one]) for one in reversed(SAMPLES)]]
    results = []
    for batches in splits:
        engine = build(max_grad_norm=0)
        gradient_steps(engine)
        results.append((engine.step(batches, sft_loss, lr=1.0), weights(engine)))
    for result, tensors in results[1:]:
        assert result.loss == pytest.approx(results[0][0].loss, rel=1e-6)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, results[0][1][name], rtol=0, atol=1e-6, msg=name)


def test_recomputation_changes_nothing(build: Build) -> None:
    results = []
    for checkpointing in (True, False):
        engine = build({"gradient_checkpointing": checkpointing})
        results.append((engine.step(BATCHES, sft_loss, lr=1e-3), weights(engine)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], tensor) for name, tensor in results[1][1].items())


def test_a_step_sets_the_learning_rate_and_frees_the_gradients(build: Build) -> None:
    engine = build(lr=1e-5)
    engine.step(BATCHES, sft_loss, lr=3e-4)
    assert {group["lr"] for group in engine.optimizer.param_groups} == {3e-4}
    assert all(p.grad is None for p in engine.trained.values())
    every, trained = engine.parameter_counts
    assert every == trained == sum(tensor.numel() for tensor in weights(engine).values())


def test_half_precision_trains_float32_weights(build: Build) -> None:
    engine, exact = build({"dtype": "bfloat16"}), build()
    # Flash attention where the device has it, which the simulated accelerator does.
    assert engine.model.attention == ("flash" if engine.world.device.type == "npu" else "sdpa")
    result, expected = (e.step(BATCHES, sft_loss, lr=1e-3) for e in (engine, exact))
    assert all(tensor.dtype == torch.float32 for tensor in weights(engine).values())
    assert result.loss == pytest.approx(expected.loss, rel=0.01)
    assert result.loss != expected.loss
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)


def test_refuses_attention_that_the_device_does_not_have(build: Build, device_type: str) -> None:
    with ExitStack() as stack:
        if device_type == "cpu":
            stack.enter_context(
                pytest.raises(ModelError, match="'cpu' has no flash attention here; use auto or sdpa")
            )
        build({"attention": "flash", "dtype": "bfloat16"})


def test_probes_look_on_at_whole_updates(build: Build) -> None:
    engine, seen = build(), list[str]()

    class Order:
        @contextmanager
        def around_update(self, engine: TrainingEngine) -> Iterator[None]:
            seen.append("begins")
            yield
            seen.append("ends")

    def work() -> Work:
        seen.append("prepares")
        return [(batch, objective) for batch in BATCHES]

    def objective(head: TokenHead) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen.append("computes")
        return sft_loss(head, LOSS_TOKENS), {}

    engine.probes.append(Order())
    engine.update(work, lr=1e-3)
    assert seen == ["begins", "prepares", "computes", "computes", "ends"]
    engine.infer(BATCHES[:1], TokenHead.logps)
    engine.step(BATCHES[:1], sft_loss, lr=1e-3)
    assert seen[5:] == ["begins", "ends"]
