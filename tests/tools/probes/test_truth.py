"""The float64 step: known values, casts that models make by themselves, and a model run in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from jobs import LR, Job, policy_objective
from packaging.version import Version
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.data.packing import PackedBatch, pack
from isotrain.device.detect import choose_device
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.world import join_world
from isotrain.models.load import build_causal_lm
from isotrain.models.packed import TokenHead
from isotrain.tools.parity.read.layer_trace import read_layer_trace
from isotrain.tools.probes.layer_trace import Sketch
from isotrain.tools.probes.truth import TruthTrace, Widening, default_dtype, memory_of, wide_parameters
from isotrain.trainers.launch import launch
from small_models import save_small
from support import tiny_recipe
from traced_runs import layers_level

BATCHES = [pack(jobs.SAMPLES[:2]), pack(jobs.SAMPLES[2:])]


@pytest.fixture
def job(tiny: Path) -> Iterator[Job]:
    device = choose_device("cpu")
    with join_world(device) as world:
        yield Job(device, world, tiny / "model")


def test_casts_of_a_model_lower_no_precision() -> None:
    """Each line is a cast that published models make; every result has all of float64's digits."""
    third = torch.tensor([1.0], dtype=torch.float64)
    with Widening():
        assert float((third / 3).float().bfloat16().to(torch.float16)) == 1 / 3
        assert float(torch.full((1,), 1.0, dtype=torch.bfloat16) / 3) == 1 / 3
        logits = torch.zeros(1, 1000, dtype=torch.bfloat16)
        logp = F.log_softmax(logits, -1, dtype=torch.float32)
        assert float(logp[0, 0]) == pytest.approx(-math.log(1000), rel=1e-15)
        total = torch.zeros((), dtype=torch.float32)
        total += third[0] / 3
        assert float(total) == 1 / 3
        with torch.autocast("cpu", enabled=False):
            angles = torch.arange(3, dtype=torch.float32).cos().to(torch.bfloat16)
    np.testing.assert_allclose(angles.numpy(), np.cos([0.0, 1.0, 2.0]), rtol=1e-15)


def test_gradients_of_float32_parameters_are_float64() -> None:
    """y = |Wx|^2 / 2 has the gradient Wxx'."""
    linear = nn.Linear(3, 2, bias=False)
    x_BD = torch.tensor([[0.1, 0.2, 0.3]])
    before, sums = linear.weight.detach().clone(), list[torch.Tensor]()
    with (
        torch.autograd.set_multithreading_enabled(False),
        wide_parameters(linear, lambda name, gradient: sums.append(gradient)),
        Widening(),
    ):
        # The cast in the middle has a backward pass, which would cast too.
        linear(x_BD.float()).bfloat16().float().square().sum().div(2).backward()
    weight, x = before.double().numpy(), x_BD.double().numpy()
    (gradient,) = sums
    np.testing.assert_allclose(gradient.numpy(), (weight @ x.T) @ x, rtol=1e-14)
    assert linear.weight.grad is None and torch.equal(linear.weight, before)
    assert "weight" not in linear.__dict__ and linear(x_BD).dtype == torch.float32


def objective(batch: PackedBatch) -> Any:
    def share(head: TokenHead) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return head.nll_share(sum(b.loss_tokens for b in BATCHES)), {}

    return share


def truth_of(engine: TrainingEngine, directory: Path) -> dict[str, np.ndarray]:
    engine.probes = [TruthTrace(directory, say=lambda line: None)]
    result = engine.update([(batch, objective(batch)) for batch in BATCHES], LR)
    assert result.applied and result.grad_norm > 0
    with safe_open(directory / "step-000001-rank-00000.safetensors", "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_the_truth_is_a_model_in_float64(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = job.policy()
    weights = {name: p.detach().clone() for name, p in engine.parameters.items()}
    engine.max_grad_norm = 0.0
    tensors = truth_of(engine, tmp_path / "truth")
    assert all(torch.equal(p, weights[name]) and p.grad is None for name, p in engine.parameters.items())
    assert torch.get_default_dtype() == torch.float32
    truth = read_layer_trace_of(tmp_path)

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    def angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = position_ids[..., None].double() * self.inv_freq.double()
        whole = torch.cat([half, half], -1)
        return whole.cos(), whole.sin()

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", angles)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float64, attn_implementation="sdpa")
    outputs = Sketch()
    model.model.layers[1].mlp.register_forward_hook(lambda m, i, output: outputs.add(output))
    tokens = sum(batch.loss_tokens for batch in BATCHES)
    loss = torch.zeros((), dtype=torch.float64)
    for batch in BATCHES:
        ends = np.cumsum(batch.lengths)
        states = []
        for start, end in zip(ends - batch.lengths, ends, strict=True):
            ids = torch.as_tensor(batch.tokens_T[start:end])[None]
            positions = torch.as_tensor(batch.positions_T[start:end])[None]
            states.append(model.model(input_ids=ids, position_ids=positions).last_hidden_state[0])
        hidden = torch.cat(states)[torch.as_tensor(batch.predict_N)]
        logits = hidden @ model.lm_head.weight.T
        loss = loss + F.cross_entropy(logits, torch.as_tensor(batch.targets_N), reduction="sum") / tokens
    loss.backward()
    assert truth.loss == pytest.approx(float(loss.detach()), rel=1e-13)
    entry = truth.kinds["activation"]["model.layers.1.mlp"]
    np.testing.assert_allclose(entry.sketches_RKK[0], outputs.numbers_KK, atol=1e-12 * entry.norm)
    gradients = truth.kinds["parameter gradient"]
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        expected = Sketch()
        assert p.grad is not None
        expected.add(p.grad)
        assert gradients[name].norm == pytest.approx(expected.norm, rel=1e-12), name
        far = np.abs(gradients[name].sketches_RKK[0] - expected.numbers_KK).max()
        assert far < 1e-12 * expected.norm, name
    assert not tensors["update/norm"].size


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.16"), reason="this version's hybrid models are refused"
)
def test_the_truth_of_a_hybrid_model_is_the_model_in_float64(tmp_path: Path) -> None:
    """Its recurrent layers read the weight of a convolution that they never call."""
    save_small("qwen3_next", tmp_path / "model", vocab_size=512)
    with join_world(device := choose_device("cpu")) as world:
        engine = Job(device, world, tmp_path / "model").policy()
        engine.max_grad_norm = 0.0
        truth_of(engine, tmp_path / "truth")
    truth = read_layer_trace_of(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float64, attn_implementation="sdpa", experts_implementation="eager"
    )
    samples = [torch.as_tensor(sample.tokens_T).long() for sample in jobs.SAMPLES]
    with torch.autograd.set_multithreading_enabled(False), default_dtype(torch.float64), Widening():
        for sample_T in samples:  # alone, and without gradient checkpointing
            logits_TV = model(input_ids=sample_T[None], use_cache=False).logits[0, 2:-1]
            (F.cross_entropy(logits_TV, sample_T[3:], reduction="sum") / jobs.TOKENS).backward()
    gradients = truth.kinds["parameter gradient"]
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        expected = Sketch()
        expected.add(p.grad)
        far = np.abs(gradients[name].sketches_RKK[0] - expected.numbers_KK).max()
        assert expected.norm > 0 and far < 1e-12 * expected.norm, name


def read_layer_trace_of(directory: Path) -> Any:
    (directory / "truth").rename(directory / "layer_trace")
    return read_layer_trace(directory)[1]


def test_gradients_are_clipped_as_the_engine_does(job: Job, tmp_path: Path) -> None:
    engine = job.policy()
    engine.max_grad_norm = 1e-3
    tensors = truth_of(engine, tmp_path / "layer_trace")
    assert math.hypot(*tensors["parameter gradient/norm"]) == pytest.approx(1e-3, rel=1e-2)
    # The engine's own clipping is back: the next update is an ordinary one.
    before = {name: p.detach().clone() for name, p in engine.parameters.items()}
    engine.update([(batch, policy_objective(batch)) for batch in BATCHES], LR)
    assert any(not torch.equal(p, before[name]) for name, p in engine.parameters.items())


def test_the_command(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    recipe = tiny_recipe(tiny, run, "cpu", trainer={"steps": 2}, observe={"layer_trace": 1, "loggers": []})
    launch(recipe, "")
    done = CliRunner().invoke(app, ["parity", "truth", str(run)])
    assert done.exit_code == 0, done.output
    assert "layers in float64" in done.output and "GB of memory" in done.output
    here, truth = read_layer_trace(run)[1], read_layer_trace(run / "truth")[1]
    assert here.digests == truth.digests
    # As far as float32 rounds, and no closer.
    assert 0 < abs(here.loss - truth.loss) < 1e-5
    for kind in ("activation", "gradient", "parameter gradient"):
        assert here.kinds[kind].keys() == truth.kinds[kind].keys()
        far = {
            name: np.linalg.norm(entry.sketches_RKK - truth.kinds[kind][name].sketches_RKK) / entry.norm
            for name, entry in here.kinds[kind].items()
        }
        assert 1e-8 < max(far.values()) < 1e-5, (kind, far)
    level = layers_level(run, run, dtype="float32")
    assert level.state == "same" and "against float64" in level.words, level.words
    untraced = tmp_path / "untraced"
    launch(tiny_recipe(tiny, untraced, "cpu", trainer={"steps": 1}), "")
    refused = CliRunner().invoke(app, ["parity", "truth", str(untraced)])
    assert refused.exit_code != 0 and "observe.layer_trace=1" in " ".join(refused.output.split())


def test_seven_billion_parameters_fit_into_64_gigabytes() -> None:
    """By plan: shapes alone, no weights."""
    config = Path(__file__).parents[3] / "benchmarks" / "plan_models" / "qwen2.5-7b"
    memory = memory_of(build_causal_lm(config, "sdpa"), tokens=512)
    assert 30e9 < memory.weights < 31e9
    assert memory.total < 64e9
