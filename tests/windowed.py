"""A model with a sliding window, for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import MistralConfig, MistralForCausalLM


def save_windowed(path: Path, vocab: int) -> None:
    """Its tokens see the last five only."""
    config = MistralConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=5,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(path)
