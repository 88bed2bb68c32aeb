"""The causes of a mismatch in the order in which they are removed, from what is reported to the layers."""

from __future__ import annotations

from dataclasses import dataclass

from isotrain.language import tr


@dataclass(frozen=True)
class Cause:
    label: str
    isolated_by: str
    """The experiment that removes it."""
    fault: bool
    """Whether it is a mistake, and no property of arithmetic."""
    remedy: tuple[str, ...] = ()
    """Recipe lines that remove or bound it."""
    advice: str = ""
    """Where no line helps, or only under a condition."""


_BOUNDED = ("algorithm.rollout_correction.level: token",)

CAUSES: dict[str, Cause] = {
    "ids": Cause(
        tr("token ids"),
        tr("other tokens before the response; which sequences are reproduced"),
        True,
        advice=tr("train on the token ids that the engine sampled; never decode and encode them again"),
    ),
    "sampling": Cause(
        tr("sampling convention"),
        tr("the trainer's log-probs at temperature 1, at the temperature, and after top-p and top-k"),
        True,
        advice=tr("have the engine report log-probs at the temperature"),
    ),
    "weights": Cause(
        tr("weights"),
        tr("the engine's tensors beside the checkpoint's, bit for bit; the trainer with the engine's"),
        True,
        advice=tr("the weight update misses these tensors: report it with their names"),
    ),
    "recording": Cause(
        tr("recorded log-probs"),
        tr("the same engine computes the recorded tokens again"),
        True,
        advice=tr("the engine that sampled had other weights, settings or tokens than were recorded"),
    ),
    "prefix": Cause(
        tr("prefix cache"),
        tr("with the cached prefixes, and with an empty cache"),
        False,
        advice=tr("empty the prefix cache after each weight update"),
    ),
    "batch": Cause(tr("batch composition"), tr("all in one batch, and each alone"), False, _BOUNDED),
    "decode": Cause(
        tr("decode kernels"),
        tr("token by token, and the whole sequence at once"),
        False,
        _BOUNDED,
    ),
    "kv_cache": Cause(
        tr("quantised KV cache"),
        tr("with the cache in the type of the model"),
        False,
        advice=tr("keep the cache in the type of the model"),
    ),
    "head": Cause(
        tr("precision of the head"),
        tr("float32 heads over the hidden states of both sides"),
        False,
        ("model.head_dtype: float32",),
    ),
    "routing": Cause(
        tr("routing of experts"),
        tr("the trainer sends tokens to the experts that the engine chose"),
        False,
        _BOUNDED,
        advice=tr("with rollout.engine: hf, algorithm.router_replay: R3 trains on the engine's routes"),
    ),
    "module": Cause(
        tr("a module that computes something else"),
        tr("each module of both sides with the engine's input"),
        True,
        advice=tr("compare this module's code and constants in the engine and in transformers"),
    ),
    "dtype": Cause(
        tr("rounding of the layers"),
        tr("both sides in float32"),
        False,
        ("model.dtype: float32",),
    ),
}
ORDER = tuple(CAUSES)
# Differences of log-probs, in nats per token, that are nobody's fault.
ROUNDING = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 0.02}
