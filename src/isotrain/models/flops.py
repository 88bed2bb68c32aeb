"""Floating-point operations of a training step, for `perf/mfu`."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PretrainedConfig

from isotrain.models.config import attention_shapes


def training_flops(parameters: int, trained: int, config: PretrainedConfig, lengths: Sequence[int]) -> float:
    """Useful operations of forward and backward over samples of the given lengths.

    2 per weight and token forward, 2 for the gradient of the activations, 2 for that of trained weights;
    causal attention does 2 x 2 x length^2 / 2 x width per layer forward and twice that backward. What is
    computed again for gradient checkpointing is not useful work and does not count.
    """
    tokens = sum(lengths)
    width = sum(shape.query_heads * shape.head_size for shape in attention_shapes(config))
    attention: float = 3 * 2 * width * sum(length * length for length in lengths)
    return 4.0 * parameters * tokens + 2.0 * trained * tokens + attention
