"""A mixture with fewer experts than usual, for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from isotrain.data.prepare.tiny import make_tiny


def save_few_experts(path: Path, experts: int) -> None:
    """Each token chooses two of them, if there are two."""
    make_tiny(path, train_rows=1, validation_rows=1, architecture="qwen3_moe")
    config = AutoConfig.from_pretrained(path / "model")
    config.num_experts, config.num_experts_per_tok = experts, min(experts, 2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path / "model")
