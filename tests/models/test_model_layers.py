"""Compiled layers compute what they computed before; checkpointed layers that fail leave nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from jobs import policy_objective, sample, updates
from transformers import LlamaConfig, LlamaForCausalLM

from isotrain.data.packing import pack
from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.world import join_world
from isotrain.errors import ModelError
from isotrain.models.layers import checkpoint_layers, compile_layers
from isotrain.models.load import build_causal_lm
from isotrain.recipe.schema import ModelSection, OptimizerSection

BATCHES = [pack([sample(9, 1), sample(30, 2)]), pack([sample(17, 3)]), pack([sample(5, i) for i in range(6)])]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler on CPUs")
@pytest.mark.parametrize("checkpointing", [True, False])
def test_training_is_the_same_up_to_rounding(tiny: Path, checkpointing: bool) -> None:
    device = choose_device("cpu")
    losses = {}
    with join_world(device) as world:
        for compiled in (False, True):
            section = ModelSection(
                path=str(tiny / "model"),
                dtype="float32",
                compile=compiled,
                gradient_checkpointing=checkpointing,
            )
            engine = build_engine(section, OptimizerSection(), device=device, world=world, seed=0)
            results = [updates(engine, policy_objective, [batch], steps=2) for batch in BATCHES]
            losses[compiled] = torch.tensor([result.loss for pair in results for result in pair])
    assert losses[False].std() > 0.1
    torch.testing.assert_close(losses[True], losses[False], rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"


def test_what_is_compiled(tiny: Path, tmp_path: Path) -> None:
    """Norms and MLPs; of a mixture the norms, since the shapes of its experts' work are data."""
    make_tiny(tmp_path, architecture="qwen3_moe", train_rows=1, validation_rows=1)
    parts = {}
    for name, path in (("dense", tiny), ("mixture", tmp_path)):
        model = build_causal_lm(path / "model", "sdpa")
        compile_layers(model)
        compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
        parts[name] = {name.split(".")[-1] for name in compiled}
    norms = {"input_layernorm", "post_attention_layernorm"}
    assert parts == {"dense": norms | {"mlp"}, "mixture": norms}


def test_a_model_without_such_parts(tiny: Path) -> None:
    model = build_causal_lm(tiny / "model", "sdpa")
    model._no_split_modules = []
    with pytest.raises(ModelError, match=r"model\.compile"):
        compile_layers(model)


@pytest.mark.parametrize("offload", [False, True])
def test_an_error_in_a_layer_does_not_reach_the_next_model(offload: bool) -> None:
    """While the error is held. torch sees to it itself from 2.13 on: the older one is the Ascend stack's."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1
    )
    model, other = (LlamaForCausalLM(config).train() for _ in range(2))
    checkpoint_layers(model, offload=offload)
    model.model.layers[1].mlp.register_forward_hook(lambda *_: refuse_layer())
    tokens_SL = torch.arange(8)[None]
    with pytest.raises(ModelError, match="this layer") as held:
        model(input_ids=tokens_SL)
    other(input_ids=tokens_SL).logits.sum().backward()
    assert held.tb is not None and all(p.grad is not None for p in other.parameters())


def refuse_layer() -> None:
    raise ModelError("this layer")
