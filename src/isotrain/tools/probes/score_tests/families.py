"""The constants that a model's config states, for families whose formulas are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isotrain.models.config import attention_shapes
from isotrain.tools.probes.score_tests.modules import Rope


class UnknownError(Exception):
    """Why a module is not tested."""


@dataclass(frozen=True)
class Family:
    """How the modules of a model type use its constants, which the config does not say."""

    adds_one: bool = False
    """Norms multiply by 1 + weight."""
    scale_field: str | None = None
    """Its root divides the products; by default the head size."""
    query_norm: str | None = None
    """Whether queries and keys are normed per head, before ("tokens") or after heads come first ("heads")."""


# Read from the published definitions. Other model types are not tested: a guess would become a verdict.
FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "qwen2": Family(),
    "qwen2_moe": Family(),
    "qwen3": Family(query_norm="tokens"),
    "qwen3_moe": Family(query_norm="tokens"),
    "gemma": Family(adds_one=True),
    "gemma2": Family(adds_one=True, scale_field="query_pre_attn_scalar"),
    "gemma3_text": Family(adds_one=True, scale_field="query_pre_attn_scalar", query_norm="heads"),
}
# Those that take the config's epsilon in every one of these families.
NORMS = {
    *("input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
_WINDOW_EVERYWHERE = {"mistral", "mixtral"}
_ROPES = {"default", "linear", "llama3"}


@dataclass(frozen=True)
class NormConstants:
    epsilon: float
    adds_one: bool


@dataclass(frozen=True)
class AttentionConstants:
    scale: float
    window: int | None
    query_norm: str | None


def norm_constants(text: Any, name: str) -> NormConstants:
    family = _family(text)
    if name.rpartition(".")[2] not in NORMS:
        raise UnknownError("a norm whose epsilon the config does not state")
    return NormConstants(float(text.rms_norm_eps), family.adds_one)


def attention_constants(text: Any, layer: int) -> AttentionConstants:
    family = _family(text)
    if getattr(text, "attn_logit_softcapping", None) is not None:
        raise UnknownError("attention that caps its scores")
    if getattr(text, "use_bidirectional_attention", False):
        raise UnknownError("attention that is not causal")
    if getattr(text, "attention_dropout", 0.0):
        raise UnknownError("attention with dropout")
    divisor = getattr(text, family.scale_field) if family.scale_field else head_size(text)
    return AttentionConstants(float(divisor) ** -0.5, _window(text, layer), family.query_norm)


def rope_constants(text: Any, layer_type: str | None) -> Rope:
    _family(text)
    stated = getattr(text, "rope_parameters", None) or {}
    if layer_type is not None and layer_type in stated:
        stated = stated[layer_type] or {}
    kind = stated.get("rope_type")
    if kind not in _ROPES:
        raise UnknownError(f"rotary embeddings of type '{kind}'")
    if stated.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnknownError("rotary embeddings of a part of each head")
    plain = Rope(kind, float(stated["rope_theta"]), head_size(text))
    if kind == "default":
        return plain
    if kind == "linear":
        return Rope(kind, plain.base, plain.head_size, float(stated["factor"]))
    return Rope(
        kind,
        plain.base,
        plain.head_size,
        float(stated["factor"]),
        float(stated["low_freq_factor"]),
        float(stated["high_freq_factor"]),
        float(stated["original_max_position_embeddings"]),
    )


def head_size(text: Any) -> int:
    sizes = {shape.head_size for shape in attention_shapes(text)}
    if len(sizes) > 1:
        raise UnknownError("heads of different sizes")
    return sizes.pop()


def _family(text: Any) -> Family:
    kind = str(text.model_type)
    if kind not in FAMILIES:
        raise UnknownError(f"the formulas of model type '{kind}' are not known here")
    return FAMILIES[kind]


def _window(text: Any, layer: int) -> int | None:
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    slides = kinds[layer] == "sliding_attention" if kinds else text.model_type in _WINDOW_EVERYWHERE
    return int(window) if slides and window else None
