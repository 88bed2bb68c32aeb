from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from isotrain.models.config import training_flops

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
)


def test_by_hand() -> None:
    # 8 tokens: 4 x 1000 x 8 + 2 x 10 x 8. Attention: 6 x 2 layers x (4 x 16) x (3 x 3 + 5 x 5).
    assert training_flops(1000, 10, CONFIG, [3, 5]) == 32_000 + 160 + 26_112


def test_head_size_follows_from_the_width_where_it_is_not_given() -> None:
    from transformers import GPT2Config

    config = GPT2Config(n_embd=48, n_layer=3, n_head=4)
    assert training_flops(0, 0, config, [10]) == 6 * 3 * 48 * 100


def test_frozen_weights_cost_two_thirds() -> None:
    assert training_flops(600, 0, CONFIG, [1]) - training_flops(0, 0, CONFIG, [1]) == 2400
    assert training_flops(600, 600, CONFIG, [1]) - training_flops(0, 0, CONFIG, [1]) == 3600


def test_it_agrees_with_counting_operators() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(CONFIG, attn_implementation="eager")
    tokens = torch.randint(0, 96, (1, 40))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    causal = training_flops(weights, weights, CONFIG, [40])
    # Without a causal kernel the masked half of the attention is computed as well.
    masked_half = training_flops(0, 0, CONFIG, [40])
    assert counter.get_total_flops() == pytest.approx(causal + masked_half, rel=1e-3)
