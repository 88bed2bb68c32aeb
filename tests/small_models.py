"""Any model type of transformers with few and small layers, whose random weights make mistakes show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LARGEST = 10_000_000

# By the names of all families; a configuration takes those that it has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 32),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "image_size"), 32),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_hidden_layers"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("index_head_dim", "linear_key_head_dim", "linear_value_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "hidden_size_per_layer_input", "patch_size"), 8),
    **dict.fromkeys(
        ("n_routed_experts", "num_experts", "num_local_experts", "index_topk", "mamba_n_heads"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "mamba_expand", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "num_kv_shared_layers"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank"), 16),
    **dict.fromkeys(("kv_lora_rank", "qk_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **{"mamba_n_heads": 4, "sliding_window": 5, "pad_token_id": 0, "eos_token_id": 2},
    **{"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63},
    **{"audio_token_id": 59, "boi_token_id": 57, "eoi_token_id": 58, "image_token_index": 60},
    **{"boi_token_index": 57, "eoi_token_index": 58},
}


def small_config(kind: str, **changes: Any) -> PretrainedConfig:
    """`changes` are fields of the language model."""
    return _small(CONFIG_MAPPING[kind], changes)


def _small(cls: Any, changes: dict[str, Any]) -> PretrainedConfig:
    default = cls()
    default.__dict__.pop("_heterogeneity_spec", None)  # fields that differ between layers can be read then
    derived = {name for name in dir(cls) if isinstance(getattr(cls, name, None), property)}

    def stated(name: str) -> Any:
        return None if name in derived else getattr(default, name, None)

    values = {name: size for name, size in SIZES.items() if stated(name) is not None}
    # Some have no default for what they need.
    for name in ("num_key_value_heads", "head_dim", "num_experts_per_tok", "n_routed_experts"):
        if hasattr(default, name) and name not in derived:
            values[name] = SIZES[name]
    if "kv_lora_rank" in values:  # latent attention has no groups of heads
        values["num_key_value_heads"] = 4
    for name in ("layer_types", "mlp_layer_types"):
        if name in cls.attribute_map:  # another name of a list that is derived
            continue
        if kinds := stated(name):  # one of each, and the last ones as they are
            values[name] = [*dict.fromkeys(kinds), *kinds[-1:] * 4][: SIZES["num_hidden_layers"]]
    for name, value in vars(default).items():
        if isinstance(value, float) and ("drop" in name):
            values[name] = 0.0
    parts = {name: getattr(default, name, None) for name in cls.sub_configs or {}}
    for name, part in parts.items():
        if isinstance(part, PretrainedConfig) and type(part) is not AutoConfig:
            values[name] = _small(type(part), changes if name == "text_config" else {})
    if "text_config" not in parts:
        values |= changes
    config: PretrainedConfig = cls(**values)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def small_model(kind: str, **changes: Any) -> PreTrainedModel:
    config = small_config(kind, **changes)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{kind} has {size} parameters")
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim < 2:
                p.add_(0.1 * noise)
            else:
                p.copy_(noise if "emb" in name else 1.3 * noise / p.shape[-1] ** 0.5)
    return model.eval()


def save_small(kind: str, directory: Path, **changes: Any) -> PreTrainedModel:
    model = small_model(kind, **changes)
    model.save_pretrained(directory)
    return model
