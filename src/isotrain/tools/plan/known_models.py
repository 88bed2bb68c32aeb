"""Sizes of published models, for plans on machines that do not reach the Hub.

Only what a plan needs of a `config.json`. A test compares the parameters of the model that these sizes make
with the published number.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class KnownModel(NamedTuple):
    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    tied: bool

    def config(self) -> dict[str, Any]:
        """A `config.json` with these sizes."""
        return {
            **_FAMILIES[self.family],
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
        }


_COMMON = {"hidden_act": "silu", "initializer_range": 0.02}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {
        **_COMMON,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
    },
    "qwen3": {
        **_COMMON,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
    },
    "llama": {
        **_COMMON,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "max_position_embeddings": 8192,
    },
}
MODELS = {
    "HuggingFaceTB/SmolLM2-135M": KnownModel("llama", 576, 1536, 30, 9, 3, 49152, True),
    "HuggingFaceTB/SmolLM2-360M": KnownModel("llama", 960, 2560, 32, 15, 5, 49152, True),
    "HuggingFaceTB/SmolLM2-1.7B": KnownModel("llama", 2048, 8192, 24, 32, 32, 49152, True),
    "Qwen/Qwen2-7B": KnownModel("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    "Qwen/Qwen2.5-0.5B": KnownModel("qwen2", 896, 4864, 24, 14, 2, 151936, True),
    "Qwen/Qwen2.5-1.5B": KnownModel("qwen2", 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-3B": KnownModel("qwen2", 2048, 11008, 36, 16, 2, 151936, True),
    "Qwen/Qwen2.5-7B": KnownModel("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    "Qwen/Qwen2.5-14B": KnownModel("qwen2", 5120, 13824, 48, 40, 8, 152064, False),
    "Qwen/Qwen2.5-32B": KnownModel("qwen2", 5120, 27648, 64, 40, 8, 152064, False),
    "Qwen/Qwen3-0.6B": KnownModel("qwen3", 1024, 3072, 28, 16, 8, 151936, True),
    "Qwen/Qwen3-1.7B": KnownModel("qwen3", 2048, 6144, 28, 16, 8, 151936, True),
    "Qwen/Qwen3-4B": KnownModel("qwen3", 2560, 9728, 36, 32, 8, 151936, True),
    "Qwen/Qwen3-8B": KnownModel("qwen3", 4096, 12288, 36, 32, 8, 151936, False),
    "Qwen/Qwen3-14B": KnownModel("qwen3", 5120, 17408, 40, 40, 8, 151936, False),
    "Qwen/Qwen3-32B": KnownModel("qwen3", 5120, 25600, 64, 64, 8, 151936, False),
}


def known_model(name: str) -> KnownModel | None:
    """The sizes of a Hub name; instruction-tuned models have those of their base."""
    name = name.partition("@")[0]
    return MODELS.get(name) or MODELS.get(name.removesuffix("-Instruct").removesuffix("-Base"))
