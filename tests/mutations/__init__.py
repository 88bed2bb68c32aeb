"""Mistakes that real trainers had, as switches that exist for tests and benchmarks only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SITE = Path(__file__).with_name("site")
VARIABLE = "ISOTRAIN_MUTATION"


@dataclass(frozen=True)
class Mutation:
    name: str
    what: str
    run: str
    """Which of the benchmark's reference runs it is a variant of."""
    where: str | None = None
    """The layer or operator that it lives in, where it has one."""
    part: Literal["data", "model", "loss", "optimizer", "online"] = "loss"


MUTATIONS = (
    Mutation("mask-shifted", "the loss mask is shifted by one token", "sft", part="data"),
    Mutation("prompts-learnt", "the mask is dropped on prompts", "sft", part="data"),
    Mutation("template-token", "the chat template lacks one token", "sft", part="data"),
    Mutation("data-order", "another order of the data", "sft", part="data"),
    Mutation("neighbours-seen", "packed samples see their neighbours", "sft", part="data"),
    Mutation(
        "norm-epsilon",
        "one norm's epsilon is 1e-5 in place of 1e-6",
        "sft",
        "layers.1.input_layernorm",
        "model",
    ),
    Mutation(
        "attention-scale",
        "attention is scaled by 2 % too much in one layer",
        "sft",
        "layers.1.self_attn",
        "model",
    ),
    Mutation("dropout-on", "dropout of 1 % is left on in one layer", "sft", "layers.0.mlp", "model"),
    Mutation("layer-in-bf16", "one layer's kernel rounds to bfloat16", "sft", "layers.1.mlp", "model"),
    Mutation("rotary-base", "the rotary base is 1 % off", "sft", "rotary_emb", "model"),
    Mutation("silu-approximate", "an activation function that is 1 % off", "sft", "act_fn", "model"),
    Mutation("accumulation", "gradients of micro-batches are summed without being scaled", "sft"),
    Mutation("rank-mean", "a mean of the ranks' means in place of the mean over all tokens", "sft-2-ranks"),
    Mutation("learning-rate", "the learning rate is 1 % too high", "sft", part="optimizer"),
    Mutation("warm-up", "the warm-up is one step late", "sft", part="optimizer"),
    Mutation("bf16-moments", "the optimizer's state is kept in bfloat16", "sft", part="optimizer"),
    Mutation("decayed-norms", "norms are decayed like matrices", "sft", part="optimizer"),
    Mutation("no-clipping", "gradients are not clipped", "sft", part="optimizer"),
    Mutation("reference-rounded", "the reference's log-probs are kept in bfloat16", "dpo"),
    Mutation("no-baseline", "the group's mean is not subtracted", "grpo", part="online"),
    Mutation("no-whitening", "advantages are not whitened", "reinforce++", part="online"),
    Mutation("kl-sign", "the KL term has the wrong sign", "grpo", part="online"),
    Mutation("old-log-probs", "old log-probs are those of a later version", "grpo", part="online"),
    Mutation("stale-weights", "the engine's weights are one version behind", "grpo-free", part="online"),
)


def environment(name: str) -> dict[str, str]:
    """Variables with which every Python process below makes that mistake."""
    path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {VARIABLE: name, "PYTHONPATH": os.pathsep.join(path)}
