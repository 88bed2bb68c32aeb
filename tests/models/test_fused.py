"""Models over fused operators compute what they compute without, forward and backward."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    Glm4Config,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from isotrain.device.npu import OPERATORS
from isotrain.models.attention import provide
from isotrain.models.fused import Fused, fuse_layers
from isotrain.models.load import IMPLEMENTATIONS
from isotrain.models.packed import Backbone

EVERYTHING = ("rms_norm", "swiglu", "rotary")
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
# Sizes of published models, with few layers and tokens.
REAL = {
    "Llama 3.2 1B": LlamaConfig(
        vocab_size=256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "Qwen2.5 0.5B": Qwen2Config(
        vocab_size=256,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=2,
        num_attention_heads=14,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "Qwen3 0.6B": Qwen3Config(
        vocab_size=256,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
}
LENGTHS = (17, 1, 30)
TOKENS = sum(LENGTHS)


@pytest.fixture(autouse=True)
def operator_is_known() -> None:
    provide(OPERATORS.attention)


def make(config: PretrainedConfig, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The same weights for every attention; norms that are not all 1."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        deepcopy(config), attn_implementation=IMPLEMENTATIONS[attention], experts_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.to("npu", dtype)


def run(
    model: PreTrainedModel, attention: str, continues: tuple[int, ...] = ()
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states and gradients over packed samples."""
    tokens_T = torch.randint(0, 60, (TOKENS,), generator=torch.Generator().manual_seed(1)).npu()
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS]).npu()
    hidden_TD = Backbone(model, attention).hidden_states(tokens_T, positions_T, LENGTHS, continues)
    factor_TD = torch.randn(hidden_TD.shape, generator=torch.Generator().manual_seed(2)).to(hidden_TD)
    (hidden_TD * factor_TD).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return hidden_TD.detach(), gradients


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of the difference, as a share of that of what is expected."""
    found, expected = found.cpu().double(), expected.cpu().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "attention"), [*((name, "fused") for name in REAL), ("Qwen3 0.6B", "fused-padded")]
)
def test_real_sizes_in_float32(name: str, attention: str) -> None:
    model, plain = make(REAL[name], attention), make(REAL[name], "sdpa")
    assert fuse_layers(model, OPERATORS) == Fused(EVERYTHING)
    (hidden, gradients), (expected, expected_gradients) = run(model, attention), run(plain, "sdpa")
    assert far(hidden, expected) < 1e-6
    assert gradients.keys() == expected_gradients.keys() and len(gradients) > 9
    for parameter, gradient in gradients.items():
        assert far(gradient, expected_gradients[parameter]) < 5e-6, parameter


@pytest.mark.heavy
@pytest.mark.parametrize("name", REAL)
def test_real_sizes_in_bfloat16_are_nearer_to_float32_than_without(name: str) -> None:
    """Eager layers round between their operators: within 2 % of float32, and fused ones not farther."""
    truth, truth_gradients = run(make(REAL[name], "sdpa").bfloat16().float(), "sdpa")
    results = {}
    for attention in ("fused", "sdpa"):
        model = make(REAL[name], attention, torch.bfloat16)
        if attention == "fused":
            fuse_layers(model, OPERATORS)
        hidden, gradients = run(model, attention)
        assert hidden.dtype == torch.bfloat16
        errors = [far(gradient, truth_gradients[parameter]) for parameter, gradient in gradients.items()]
        results[attention] = far(hidden, truth), max(errors)
    hidden_error, gradient_error = results["fused"]
    plain_error, plain_gradient_error = results["sdpa"]
    print(f"{name}: states {hidden_error:.2e} ({plain_error:.2e} without fused operators), "
          f"gradients {gradient_error:.2e} ({plain_gradient_error:.2e})")  # fmt: skip
    assert hidden_error < 0.02 and hidden_error < 1.1 * plain_error
    assert gradient_error < 0.04 and gradient_error < 1.1 * plain_gradient_error


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(**SMALL), Fused(EVERYTHING)),
        (Olmo2Config(**SMALL, eos_token_id=1), Fused(EVERYTHING)),
        # Weight + 1 in the norms, and GELU.
        (GemmaConfig(**SMALL), Fused(("rotary",), ("GemmaMLP", "GemmaRMSNorm"))),
        # Gate and up projection in one, which would fit, but is not among the known kinds.
        (Phi3Config(**SMALL, eos_token_id=1), Fused(("rms_norm", "rotary"), ("Phi3MLP",))),
        # Pairs of neighbours are turned, and half of each head.
        (Glm4Config(**SMALL, eos_token_id=1), Fused(("rms_norm",), ("Glm4Attention", "Glm4MLP"))),
        # The experts are one layer of their own.
        (Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2), Fused(("rms_norm", "rotary"))),
        (LlamaConfig(**SMALL, hidden_act="gelu"), Fused(("rms_norm", "rotary"), ("LlamaMLP",))),
        # Cosines above 1.
        (
            LlamaConfig(**SMALL, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
            Fused(("rms_norm", "swiglu"), ("LlamaAttention",)),
        ),
    ],
    ids=["llama", "olmo2", "gemma", "phi3", "glm4", "experts", "gelu", "yarn"],
)  # fmt: skip
def test_only_known_kinds_are_fused(config: PretrainedConfig, expected: Fused) -> None:
    model = make(config, "sdpa")
    assert fuse_layers(model, OPERATORS) == expected
    hidden, gradients = run(model, "sdpa")
    plain, plain_gradients = run(make(config, "sdpa"), "sdpa")
    assert far(hidden, plain) < 1e-6
    for name, gradient in gradients.items():
        assert far(gradient, plain_gradients[name]) < 1e-5, name


class OneMoreRMSNorm(LlamaRMSNorm):
    """Has the parts of the known kind and computes something else."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) + hidden_states * 0.01


class NoEpsilonRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden_states * hidden_states.square().mean(-1, keepdim=True).rsqrt()


class ClampedMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=1) * self.up_proj(x))


class DroppingMLP(LlamaMLP):
    """One more part than the known kind."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(0.5)


@pytest.mark.parametrize(
    "layer",
    [
        OneMoreRMSNorm(8),
        NoEpsilonRMSNorm(8, eps=1e-3),
        ClampedMLP(LlamaConfig(**SMALL)),
        DroppingMLP(LlamaConfig(**SMALL)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_a_look_alike_is_not_fused(layer: nn.Module) -> None:
    model = make(LlamaConfig(**SMALL), "sdpa")
    model.add_module("odd", layer)
    assert fuse_layers(model, OPERATORS) == Fused(EVERYTHING, (type(layer).__name__,))
    assert "forward" not in vars(layer)


def test_other_models_and_the_generator_are_left_alone() -> None:
    model, earlier = (make(LlamaConfig(**SMALL), "sdpa") for _ in range(2))
    names = [name for name, _ in model.named_parameters()]
    state = torch.get_rng_state()
    fuse_layers(model, OPERATORS)
    assert torch.equal(torch.get_rng_state(), state)
    assert [name for name, _ in model.named_parameters()] == names
    assert any("forward" in vars(layer) for layer in model.modules())
    for other in (earlier, make(LlamaConfig(**SMALL), "sdpa")):
        assert not any("forward" in vars(layer) for layer in other.modules())


def test_the_text_for_people() -> None:
    assert str(Fused()) == "none"
    assert str(Fused(("attention", "rotary"), ("GemmaMLP",))) == (
        "attention, rotary (unsupported layers: GemmaMLP)"
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_checkpointing(checkpointing: bool) -> None:
    config = Qwen3Config(**SMALL)
    model, plain = make(config, "fused"), make(config, "sdpa")
    fuse_layers(model, OPERATORS)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    (_, gradients), (_, expected) = run(model, "fused"), run(plain, "sdpa")
    assert model.is_gradient_checkpointing == checkpointing and gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert far(gradient, expected[name]) < 1e-5, name


def test_weights_on_the_meta_device() -> None:
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    assert fuse_layers(model, OPERATORS) == Fused(EVERYTHING)
