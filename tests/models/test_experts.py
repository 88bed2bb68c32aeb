"""Experts over a device's grouped product compute what transformers' own loop over them computes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from isotrain.device.npu import OPERATORS
from isotrain.models.experts import provide_experts, use_grouped, uses_grouped

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**SMALL, num_experts=8),
    "deepseek_v3": DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4, "first_k_dense_replace": 1},
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    # Biases, transposed weights, interleaved gates.
    "gpt_oss": GptOssConfig(**SMALL, num_local_experts=8),
}


def models(config: PretrainedConfig) -> tuple[Any, Any]:
    """Two with the same weights on the simulated device, the second over grouped products."""
    provide_experts(OPERATORS.grouped_matmul)
    torch.manual_seed(0)
    eager, grouped = (
        AutoModelForCausalLM.from_config(deepcopy(config), experts_implementation="eager").to("npu")
        for _ in range(2)
    )
    use_grouped(grouped)
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.normal_(0, 0.2)
    grouped.load_state_dict(eager.state_dict())
    return eager, grouped


@pytest.mark.parametrize("name", CONFIGS)
def test_grouped_products_equal_the_loop_over_experts(name: str) -> None:
    eager, grouped = models(CONFIGS[name])
    assert uses_grouped(grouped) and not uses_grouped(eager)
    ids = torch.arange(5, 45, device="npu").view(2, 20)
    results = []
    for model in (eager, grouped):
        logits = model(input_ids=ids).logits
        logits.logsumexp(-1).sum().backward()
        results.append(logits)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    for (parameter, one), (_, other) in zip(
        eager.named_parameters(), grouped.named_parameters(), strict=True
    ):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-4, msg=parameter)
    assert any(".experts." in parameter for parameter, _ in grouped.named_parameters())


def test_experts_that_nobody_chose_have_zero_gradients() -> None:
    """Their gradients are zero, whatever the operator leaves there."""
    eager, grouped = models(CONFIGS["qwen3_moe"])
    ids = torch.tensor([[7, 7]], device="npu")
    for model in (eager, grouped):
        model(input_ids=ids).logits.sum().backward()
    chosen = 0
    for (name, one), (_, other) in zip(eager.named_parameters(), grouped.named_parameters(), strict=True):
        if ".experts." in name:
            used_E = one.grad.flatten(1).any(1)
            assert torch.equal(other.grad.flatten(1).any(1), used_E) and not used_E.all()
            chosen += int(used_E.sum())
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-4)
    assert chosen


def test_grouped_products_in_bfloat16_equal_the_loop() -> None:
    eager, grouped = (model.bfloat16() for model in models(CONFIGS["qwen3_moe"]))
    ids = torch.arange(3, 23, device="npu").view(1, 20)
    one, other = (model(input_ids=ids).logits for model in (eager, grouped))
    assert other.dtype == torch.bfloat16
    torch.testing.assert_close(other, one, rtol=0.05, atol=0.2)


def test_a_group_of_one_expert_is_a_plain_product() -> None:
    rows, weights = torch.randn(6, 4, device="npu"), torch.randn(1, 4, 3, device="npu")
    counts = torch.tensor([6], device="npu")
    torch.testing.assert_close(OPERATORS.grouped_matmul(rows, weights, counts), rows @ weights[0])


def test_a_model_without_experts_uses_no_grouped_products() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {name: value for name, value in SMALL.items() if "moe" not in name and "experts" not in name}
    assert not uses_grouped(LlamaForCausalLM(LlamaConfig(**small)))
