"""Recurrent layers over packs: no sample sees another, and a shared prompt is seen by its responses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM

from isotrain.data.items import Sample
from isotrain.data.packing import PackedBatch, pack, pack_shared
from isotrain.device.detect import choose_device
from isotrain.engine.build import choose_attention, split_context
from isotrain.errors import ModelError
from isotrain.models.load import EAGER, IMPLEMENTATIONS, build_causal_lm
from isotrain.models.mixers import mixers_of
from isotrain.models.packed import PackedModel
from isotrain.recipe.schema import ModelSection
from small_models import save_small

# 5.5.4, of the Ascend stack, does not tell these layers where samples begin.
pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.16"), reason="this version's hybrid models are refused"
)


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_text"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if not mixers_of(save_small(request.param, path)):
        pytest.skip("this version of transformers calls the layers otherwise")
    return path


def load(directory: Path, device_type: str, attention: str = "sdpa") -> PackedModel:
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation=IMPLEMENTATIONS[attention],
        experts_implementation=EAGER,
    )
    return PackedModel(model.to(device_type), attention, logits_chunk=7)


def logps(model: PackedModel, batch: PackedBatch) -> torch.Tensor:
    batch = batch.to(next(model.parameters()).device)
    inputs = (batch.tokens_T, batch.positions_T, batch.lengths, batch.predict_N, batch.targets_N)
    logp_N: torch.Tensor = model(*inputs, lambda head: head.logps(), batch.continues)
    return logp_N


def samples() -> tuple[list[Sample], list[int]]:
    """Responses to two prompts, one longer than a chunk of the recurrence, and their prompts' lengths."""
    draw = np.random.default_rng(3)
    prompt, other = draw.integers(3, 60, 75), draw.integers(3, 60, 5)
    rows = [(prompt, 7), (other, 4), (prompt, 7), (prompt, 2), (other, 90), (prompt, 0), (prompt, 1)]
    made = []
    for begin, length in rows:
        tokens_T = np.concatenate([begin, draw.integers(3, 60, length)]).astype(np.int32)
        made.append(Sample(tokens_T, np.arange(len(tokens_T)) >= len(begin)))
    return made, [len(begin) for begin, _ in rows]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_shared_padded_and_alone_agree(directory: Path, device_type: str, checkpointing: bool) -> None:
    made, prompts = samples()
    ways: dict[str, tuple[str, list[PackedBatch]]] = {
        "alone": ("padded", [pack([sample]) for sample in made]),
        "padded": ("padded", [pack(made)]),
        "packed": ("sdpa", [pack(made)]),
        "shared": ("sdpa", [pack_shared(made, prompts)]),
    }
    results: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {}
    for way, (attention, batches) in ways.items():
        model = load(directory, device_type, attention).train()
        if checkpointing:
            model.pretrained.gradient_checkpointing_enable({"use_reentrant": False})
        logp_N = torch.cat([logps(model, batch) for batch in batches])
        (logp_N * torch.linspace(-1, 2, len(logp_N), device=logp_N.device)).sum().backward()
        results[way] = logp_N.detach(), {name: p.grad for name, p in model.named_parameters()}
    expected_N, gradients = results.pop("alone")
    assert expected_N.std() > 0.1
    for way, (logp_N, found) in results.items():
        torch.testing.assert_close(
            logp_N, expected_N, rtol=0, atol=1e-5, msg=lambda m, way=way: f"{way}: {m}"
        )
        for name, gradient in gradients.items():
            scale = float(gradient.abs().max()) + 1e-6
            difference = float((found[name] - gradient).abs().max()) / scale
            assert difference < 1e-4, (way, name, difference)


@torch.no_grad()
def test_without_taking_samples_apart_they_would_see_each_other(directory: Path) -> None:
    """transformers' fallback is told the borders, does not say that it ignores them, and is wrong."""
    made, _ = samples()
    model, batch = load(directory, "cpu"), pack(made)
    right_N = logps(model, batch)
    bounds = torch.tensor((0, *batch.lengths)).cumsum(0, dtype=torch.int32)
    for mixer in mixers_of(model):
        whole = type(mixer).forward.__get__(mixer)
        mixer.forward = lambda hidden_states, *, whole=whole, **_: whole(  # type: ignore[method-assign]
            hidden_states, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds
        )
    assert (logps(model, batch) - right_N).abs().max() > 0.1


@torch.no_grad()
def test_a_mixer_that_is_not_told_where_samples_begin_says_so(directory: Path) -> None:
    model = load(directory, "cpu")
    with pytest.raises(ModelError, match=r"where packed samples begin; set model\.attention=padded"):
        mixers_of(model)[0](torch.zeros(1, 5, model.pretrained.config.hidden_size))


def test_what_is_not_supported_is_refused(directory: Path) -> None:
    with pytest.raises(ModelError, match=r"\(linear_attention\) beside attention; set model\.attention=sdpa"):
        build_causal_lm(directory, "flash")
    section = ModelSection.model_validate({"path": str(directory), "dtype": "bfloat16", "fused": "off"})
    assert choose_attention(directory, section, choose_device("npu")) == "sdpa"
    world: Any = SimpleNamespace(shape=SimpleNamespace(context=2))
    with pytest.raises(ModelError, match=r"device\.mesh\.context: recurrent layers .*; set it to 1"):
        split_context(load(directory, "cpu"), world)
