"""Held-out mistakes: what each is, and the runs that it can happen in.

They were written after every threshold was frozen, and the benchmark runs them once. Those marked `ascend`
happened on Ascend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["sft", "dpo", "replay", "free", "sampler"]
FAMILIES = ("llama", "qwen3-moe", "gemma3")
_L, _Q, _G = FAMILIES
_ENGINE: tuple[Kind, ...] = ("free", "sampler")
_SAMPLER: tuple[Kind, ...] = ("sampler",)
_UPDATE: tuple[Kind, ...] = ("replay",)


@dataclass(frozen=True)
class HeldOut:
    name: str
    what: str
    kinds: tuple[Kind, ...] = ("sft",)
    families: tuple[str, ...] = FAMILIES
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Those in which it can act at all."""
    ranks: int = 1
    long: bool = False
    """Whether it is also tried in runs of 500 steps."""
    settings: tuple[str, ...] = ()
    """What the recipe of both runs needs, so that it can act."""
    ascend: bool = False


_TOP_P = ("rollout.top_p=0.9",)
_TOP_K = ("rollout.top_k=20",)
_32 = ("float32",)

LAYERS = (
    HeldOut("mask-past-keys", "the causal mask is ignored past 32 keys", ascend=True),
    HeldOut("masks-dropped", "the attention backend drops its mask", kinds=("sft", "dpo"), ascend=True),
    HeldOut("heads-in-turn", "key heads are repeated in turn, not one by one", families=(_Q, _G)),
    HeldOut("softmax-bf16", "attention probabilities are rounded to bfloat16"),
    HeldOut("window-dropped", "the sliding window is dropped", families=(_G,), ascend=True),
    HeldOut("window-larger", "the sliding window is one key larger", families=(_G,), long=True),
    HeldOut("uniform-attention", "one layer's attention is a plain average", ("sft", "dpo"), ascend=True),
    HeldOut("queries-not-normed", "one layer lacks the norm of queries and keys", families=(_Q, _G)),
    HeldOut("norm-without-one", "one norm lacks Gemma's 1 + weight", families=(_G,)),
    HeldOut("rotary-pairs", "the rotary embedding turns neighbours, not halves"),
    HeldOut("router-not-normed", "expert weights do not add up to 1", ("sft", "dpo"), families=(_Q,)),
    HeldOut("router-bf16", "routers read inputs rounded to bfloat16", families=(_Q,), dtypes=_32),
    HeldOut("expert-capacity", "tokens beyond an expert's capacity are dropped", families=(_Q,)),
    HeldOut("gelu-exact", "GELU is computed exactly, not by tanh", families=(_G,)),
    HeldOut("embedding-scale", "the embedding's scale is rounded", families=(_G,), dtypes=_32),
)
"""Of attention and layers."""

OTHERS = (
    # data and loss
    HeldOut("end-not-learnt", "the last token of a response bears no loss"),
    HeldOut("sample-lost", "the last sample of each micro-batch is lost"),
    HeldOut("batch-repeated", "every tenth batch is the one before"),
    HeldOut("prompt-counted", "the loss is divided by one token more per sample"),
    HeldOut("mean-of-sequences", "the loss is a mean of sequences, not of tokens"),
    HeldOut("label-smoothing", "labels are smoothed by 1 %"),
    HeldOut("z-loss", "a z-loss of 1e-4 is left on"),
    # optimizer
    HeldOut("norm-frozen", "one norm is never updated"),
    HeldOut("layer-frozen-late", "one layer stops being updated late in the run", long=True, ascend=True),
    HeldOut("state-lost-late", "a late resume has lost the optimizer's state", long=True, ascend=True),
    HeldOut("schedule-restarted-late", "a late resume starts the schedule again", long=True),
    HeldOut("cosine-longer", "the cosine is 10 % longer than the run"),
    HeldOut("adam-beta", "Adam's second beta is 0.999, not 0.95", kinds=("sft", "dpo")),
    HeldOut("adam-epsilon", "Adam's epsilon is 1e-6, not 1e-8"),
    HeldOut("decay-in-gradient", "weight decay is added to the gradient"),
    HeldOut("bias-uncorrected", "Adam's moments are not corrected for their start", kinds=("sft", "dpo")),
    HeldOut("clipped-one-by-one", "each tensor is clipped by its own norm"),
    HeldOut("gradients-bf16", "gradients are summed in bfloat16", dtypes=_32, long=True),
    # several ranks
    HeldOut("average-as-sum", "an average over ranks is a sum", ranks=2, ascend=True),
    HeldOut("clipped-by-rank", "each rank clips by its own norm", ranks=2, ascend=True),
    HeldOut("reduced-in-bf16", "gradients are reduced in bfloat16", ranks=2, ascend=True),
    # preferences
    HeldOut("mean-log-probs", "log-probs of a response are averaged", kinds=("dpo",)),
    HeldOut("beta-larger", "DPO's beta is 10 % too large", kinds=("dpo",)),
    HeldOut("reference-of-neighbour", "a pair has its neighbour's reference log-probs", kinds=("dpo",)),
    # policy updates
    HeldOut("log-prob-temperature", "log-probs at temperature 1, not 0.9", ("replay", "free"), ascend=True),
    HeldOut("kl-estimator", "the KL term uses k1, not k3", _UPDATE),
    HeldOut("mean-of-responses", "the loss is a mean of responses, not of tokens", _UPDATE),
    HeldOut("clip-higher", "the upper clip range is 0.28, not 0.2", _UPDATE),
    HeldOut("population-deviation", "advantages use the deviation of a population", _UPDATE),
    HeldOut("advantage-of-neighbour", "a response has its neighbour's advantage", ("replay", "free")),
    HeldOut("reference-follows", "the reference is the policy of the moment", _UPDATE),
    HeldOut("other-ids", "the trainer's tokenizer has other ids", ("replay", "free"), ascend=True),
    # engines
    HeldOut("tensor-not-taken", "the engine does not take one tensor", ("free",), ascend=True),
    HeldOut("other-layout", "one tensor is in the wrong layout in the engine", _ENGINE, ascend=True),
    HeldOut("stale-prefixes", "prompts are cached from before the update", ("free",), ascend=True),
    HeldOut("one-expert", "the engine routes to one expert, not two", _ENGINE, (_Q,), ascend=True),
    HeldOut("engine-without-window", "the engine drops the sliding window", _ENGINE, (_G,), ascend=True),
    HeldOut("prompt-token-missing", "the engine's prompt lacks its first token", _ENGINE, ascend=True),
    HeldOut("padding-seen", "the engine attends to padding", _ENGINE, ascend=True),
    # samplers
    HeldOut("token-0", "always token 0 is drawn", _SAMPLER, ascend=True),
    HeldOut("temperature-ignored", "tokens are drawn at temperature 1, not 0.9", _SAMPLER, ascend=True),
    HeldOut("one-noise", "all responses are drawn with the same noise", _SAMPLER),
    HeldOut("coarse-logits", "logits are drawn from in steps of a quarter", _SAMPLER),
    HeldOut("top-p-early", "top-p cuts one token too early", _SAMPLER, settings=_TOP_P, ascend=True),
    HeldOut("top-p-late", "top-p cuts one token too late", _SAMPLER, settings=_TOP_P, ascend=True),
    HeldOut("top-k-late", "top-k cuts one token too late", _SAMPLER, settings=_TOP_K),
)

HELD_OUT = (*LAYERS, *OTHERS)
