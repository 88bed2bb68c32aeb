"""Routes of a mixture's tokens, in runs, in truths that take them, and in the verdict on both."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.data.prepare.tiny import make_tiny
from isotrain.tools.parity.levels.level import Level
from isotrain.tools.parity.levels.routes import first_apart
from isotrain.tools.parity.read.layer_trace import Update, read_layer_trace
from isotrain.trainers.launch import launch
from support import tiny_recipe
from traced_runs import layers_level

EXPERTS = "model.layers.1.mlp.experts"
Router = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


# Some versions of transformers record probabilities under the name of logits.
PROBABILITIES = "router_logits = torch.nn.functional.softmax" in inspect.getsource(
    qwen3_moe.Qwen3MoeTopKRouter.forward
)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In each layer two experts have routers that differ by float32's last digits: some tokens flip."""
    path = tmp_path_factory.mktemp("mixture")
    make_tiny(path, train_rows=16, validation_rows=1, architecture="qwen3_moe")
    file = path / "model" / "model.safetensors"
    weights = load_file(file)
    for name, weight_ED in weights.items():
        if name.endswith("mlp.gate.weight"):
            weight_ED[1] = weight_ED[0] * (1 + 1e-7 * torch.randn(weight_ED.shape[1]))
    save_file(weights, file, {"format": "pt"})
    return path


def train(mixture: Path, run: Path, dtype: str, device: str = "cpu") -> Path:
    model = {"path": str(mixture / "model"), "dtype": dtype}
    observe = {"layer_trace": 1, "loggers": []}
    launch(tiny_recipe(mixture, run, device, model=model, trainer={"steps": 1}, observe=observe), "")
    return run


def truth(*arguments: Path | str) -> str:
    done = CliRunner().invoke(app, ["parity", "truth", *map(str, arguments)])
    return (
        done.output if done.exit_code == 0 else f"exit code {done.exit_code}: {done.output} {done.exception}"
    )


def other_norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """A root and a quotient, rounded once at the end."""
    wide = hidden.float()
    root = ((wide * wide).sum(-1, keepdim=True) / wide.shape[-1] + self.variance_epsilon).sqrt()
    return (wide / root * self.weight.float()).to(hidden.dtype)


def other_router(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits that are rounded after the choice, not before."""
    logits = torch.nn.functional.linear(x.reshape(-1, self.hidden_dim).float(), self.weight.float())
    weights, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
    recorded = logits.softmax(-1) if PROBABILITIES else logits.to(x.dtype)
    return recorded, (weights / weights.sum(-1, keepdim=True)).to(recorded.dtype), chosen


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def reference(
    request: pytest.FixtureRequest, mixture: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run = train(mixture, tmp_path_factory.mktemp("runs") / request.param / "reference", request.param)
    assert truth(run).strip().endswith(f"truth: {run / 'truth'}")
    return run


def dtype_of(run: Path) -> str:
    return run.parent.name


def update(run: Path) -> Update:
    return read_layer_trace(run)[1]


def verdict(reference: Path, candidate: Path) -> Level:
    return layers_level(reference, candidate, dtype=dtype_of(reference))


def test_a_truth_takes_the_routes_of_its_run(reference: Path) -> None:
    run, forced = update(reference), update(reference / "truth")
    assert list(run.routes) == ["model.layers.0.mlp.experts", EXPERTS]
    assert first_apart(run, forced) is None
    free = {name: np.argsort(-scores, axis=1)[:, :2] for name, scores in forced.scores.items()}
    flips = sum(
        (np.sort(free[name]) != np.sort(route)).any(axis=1).sum() for name, route in run.routes.items()
    )
    assert flips > 0, "a truth with routes of its own would be another step"
    level = verdict(reference, reference)
    assert level.state == "same" and level.truth == dtype_of(reference), level.words
    assert sum(entry["flips"] for entry in level.evidence["routes"]) == 2 * flips


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_honest_runs_with_other_routes_are_the_same(
    reference: Path, mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(qwen3_moe.Qwen3MoeRMSNorm, "forward", other_norm)
        patch.setattr(qwen3_moe.Qwen3MoeTopKRouter, "forward", other_router)
        candidate = train(mixture, tmp_path / "candidate", dtype_of(reference), device)
    apart = first_apart(update(reference), update(candidate))
    assert apart is not None
    level = verdict(reference, candidate)
    assert level.state == "cannot tell" and f"other experts of {apart}" in level.words, level.words
    assert "--routes CANDIDATE" in level.words and level.truth is None
    assert "truth: " in truth(reference, "--routes", candidate)
    level = verdict(reference, candidate)
    assert level.state == "same" and level.truth == dtype_of(reference), level.words
    # Without any truth, only what comes before the first flip can be compared.
    bare = shutil.copytree(reference, tmp_path / "bare", ignore=lambda *_: ["truth"])
    shutil.rmtree(candidate / "truth")
    level = layers_level(bare, candidate, dtype=dtype_of(reference))
    assert level.state == "cannot tell" and apart in level.words, level.words


def warmer(forward: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return forward(x * 1.1)


def swapped(forward: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, weights, chosen = forward(x)
    return logits, weights, torch.where(chosen < 6, chosen, 13 - chosen)


def ranks(first: int, last: int) -> Any:
    def route(forward: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        recorded = forward(x)[0]
        probabilities = recorded if PROBABILITIES else recorded.float().softmax(-1)
        weights, chosen = probabilities.topk(last, dim=-1)
        weights, chosen = weights[:, first:], chosen[:, first:]
        return recorded, (weights / weights.sum(-1, keepdim=True)).to(recorded.dtype), chosen

    return route


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (warmer, "model.layers.1.mlp.gate"),
        (swapped, f"other experts of {EXPERTS} than float64"),
        (ranks(1, 3), f"other experts of {EXPERTS} than float64"),
        (ranks(0, 3), f"router of {EXPERTS} chooses 3 experts for each token, the reference's 2"),
    ],
    ids=["scale", "swapped-experts", "next-rank", "one-more"],
)
def test_wrong_routers_are_different(
    reference: Path,
    mixture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Any,
    named: str,
    forced: bool,
) -> None:
    right = qwen3_moe.Qwen3MoeSparseMoeBlock.__init__

    def wrong(self: Any, config: Any) -> None:
        right(self, config)
        block.append(self)
        if len(block) == config.num_hidden_layers:
            forward = self.gate.forward
            self.gate.forward = lambda x: mistake(forward, x)

    block: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(qwen3_moe.Qwen3MoeSparseMoeBlock, "__init__", wrong)
        candidate = train(mixture, tmp_path / "candidate", dtype_of(reference))
    if forced:
        output = truth(reference, "--routes", candidate)
        assert ("3 experts" in " ".join(output.split())) is ("3 experts" in named), output
    level = verdict(reference, candidate)
    if PROBABILITIES and mistake is warmer and dtype_of(reference) == "bfloat16":
        # Of small logits the probabilities are nearly equal, and show less of their scale.
        assert level.state != "same", level.words
        return
    assert level.state == "different" and named in level.words, level.words


def test_truths_of_two_models_are_not_mixed(reference: Path, mixture: Path, tmp_path: Path) -> None:
    model = shutil.copytree(mixture, tmp_path / "model")
    config = model / "model" / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert config.read_text() != text
    candidate = train(model, tmp_path / "candidate", dtype_of(reference))
    truth(candidate)
    level = verdict(reference, candidate)
    assert level.state == "not run" and "the two truths are of other models" in level.words
