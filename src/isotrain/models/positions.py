"""How many positions a model has, with the scaling of its rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PretrainedConfig

from isotrain.models.config import text_config


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
