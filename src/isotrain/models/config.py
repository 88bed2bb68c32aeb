"""Facts about a language model from its configuration, wherever in it they stand.

Composite models, which read images or sound too, keep them in a part of their own. A field that is looked for
at the top is then missing, which looks like a model without a window, a soft cap or experts. All other
modules ask here, or read a `text_config`; a test of the source keeps them from reading the top.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isotrain.errors import ModelError
from isotrain.files import parse_json, read_regular

# Engines that do not import transformers read files with this module too.
if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Where `config.json` of a composite model keeps its language model, as transformers looks for it.
_TEXT_PARTS = ("text_config", "decoder", "generator", "text_encoder")

# Families have different names for the same.
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")


def text_config(source: PretrainedConfig | PreTrainedModel) -> PretrainedConfig:
    """The configuration of the language model in a model; that of a plain one is the whole."""
    config: Any = getattr(source, "config", source)
    try:
        text: PretrainedConfig = config.get_text_config()
    except ValueError as error:  # more than one part could be it
        raise ModelError(f"model type '{config.model_type}' has more than one language model") from error
    return text


def text_part(stored: dict[str, Any]) -> dict[str, Any]:
    """The same of a `config.json`; changing it changes the whole."""
    parts = (stored.get(name) for name in _TEXT_PARTS)
    return next((part for part in parts if isinstance(part, dict)), stored)


def model_end_tokens(directory: Path) -> tuple[int, ...]:
    """From the generation configuration, or else the model's own; some models have several."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        stored = parse_json(read_regular(path)) if path.is_file() else {}
        for part in (stored, text_part(stored)):
            if (ends := part.get("eos_token_id")) is not None:
                return tuple(ends) if isinstance(ends, list) else (int(ends),)
    return ()


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """One for each layer. They can differ, and transformers refuses to read such a field of the whole."""
    text = text_config(config)
    per_layer = getattr(text, "per_layer_config", None)  # older versions of transformers have none
    return [text] * text.num_hidden_layers if per_layer is None else list(per_layer)


class AttentionShape(NamedTuple):
    query_heads: int
    key_heads: int
    """Heads of keys and values, which groups of query heads may share."""
    head_size: int


def attention_shapes(config: PretrainedConfig) -> list[AttentionShape]:
    """Shape of each layer's attention."""
    shapes = []
    for layer in layer_configs(config):
        heads = layer.num_attention_heads
        size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        shapes.append(AttentionShape(heads, getattr(layer, "num_key_value_heads", None) or heads, size))
    return shapes


def vocabulary_size(source: PretrainedConfig | PreTrainedModel) -> int:
    return int(text_config(source).vocab_size)


def number_of_experts(config: PretrainedConfig) -> int:
    """Experts of one layer; 0 for dense models."""
    return next(_set(text_config(config), _EXPERTS), 0)


def chosen_experts(config: PretrainedConfig) -> int:
    """How many experts of a layer a token is sent to; 0 for dense models."""
    if not number_of_experts(config):
        return 0
    chosen = next(_set(text_config(config), _CHOSEN_EXPERTS), 0)
    if not chosen:
        raise ModelError(
            f"config.json of model type '{config.model_type}' does not say how many experts a token has"
        )
    return chosen


def active_experts(config: PretrainedConfig) -> float:
    """The share of a layer's experts that a token is sent to; 1 for dense models."""
    experts = number_of_experts(config)
    return chosen_experts(config) / experts if experts else 1.0


def _set(text: PretrainedConfig, names: tuple[str, ...]) -> Iterator[int]:
    return (int(count) for name in names if (count := getattr(text, name, None)))


def layer_kinds(config: PretrainedConfig) -> set[str]:
    """Kinds of layers that mix tokens, where the configuration lists them."""
    return set(getattr(text_config(config), "layer_types", None) or ())


def has_window(config: PretrainedConfig) -> bool:
    """Whether some layer attends to the last so many tokens only."""
    if kinds := layer_kinds(config):
        return "sliding_attention" in kinds
    return any(
        getattr(layer, "sliding_window", None) and getattr(layer, "use_sliding_window", True)
        for layer in layer_configs(config)
    )


def attention_cap(config: PretrainedConfig) -> float | None:
    """Soft cap of the scores of attention."""
    cap: float | None = getattr(text_config(config), "attn_logit_softcapping", None)
    return cap


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


@dataclass(frozen=True)
class Positions:
    limit: int | None
    """Tokens of the longest sequence; None where the config does not say."""
    config_changes: dict[str, int] = field(default_factory=dict)
    """Entries of the model's config that an engine needs to allow that many."""


def positions(config: PretrainedConfig) -> Positions:
    """YaRN and linear scaling stretch positions by a factor, which configs leave out of their own limit.

    llama3 and longrope configs have the stretched limit already. So do those with one scaling per kind of
    layer. With `dynamic`, frequencies beyond the limit depend on the longest sample of a pack: not allowed.
    """
    text = text_config(config)
    declared: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None)
    if declared is None or not isinstance(rope, dict):
        return Positions(declared)
    factor = rope.get("factor") or 1.0
    if rope.get("rope_type") == "linear":
        return Positions(int(declared * factor))
    if rope.get("rope_type") == "yarn":
        stretched = int(rope["original_max_position_embeddings"] * factor)
        if stretched > declared:
            # Engines differ in whether they stretch a limit; one that is stretched, all take as it is.
            return Positions(stretched, {"max_position_embeddings": stretched})
    return Positions(declared)


def stated_constants(config: PretrainedConfig) -> str:
    """All that a configuration says of its model, without where and with what it was written."""
    left_out = ("transformers_version", "dtype", "torch_dtype")
    stated = {key: value for key, value in config.to_dict().items() if key[0] != "_" and key not in left_out}
    return json.dumps(stated, sort_keys=True, default=str)
