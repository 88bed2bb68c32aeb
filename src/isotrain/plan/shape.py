"""What a plan must know of a model: its configuration, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from isotrain.errors import ModelError
from isotrain.models.load import read_config


def config_directory(path: str) -> Path:
    """A directory with the model's config.json; of a Hub model, nothing else is downloaded."""
    local = Path(path).expanduser()
    if (local / "config.json").is_file():
        return local
    if local.exists() or path.startswith((".", "/", "~")):
        raise ModelError(f"model.path: '{path}' has no config.json; set a Hugging Face model directory")
    from huggingface_hub import constants, hf_hub_download

    name, _, revision = path.partition("@")
    try:
        found = hf_hub_download(
            name, "config.json", revision=revision or None, local_files_only=constants.HF_HUB_OFFLINE
        )
    except Exception as error:  # the Hub client raises many kinds; all mean the same to the user
        raise ModelError(
            f"model.path: '{path}' is neither a local directory with a config.json nor reachable on the Hub "
            f"({error})"
        ) from error
    return Path(found).parent


@dataclass(frozen=True)
class Shape:
    config: PretrainedConfig
    layers: int
    key_heads: int
    head_size: int

    @classmethod
    def of(cls, directory: Path) -> Shape:
        config = read_config(directory).get_text_config()
        heads = config.num_attention_heads
        return cls(
            config,
            config.num_hidden_layers,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
        )

    def cache_bytes(self, tensor_parallel: int) -> int:
        """Of one token on one device of an engine: keys and values of all layers, in bfloat16."""
        heads = max(1, self.key_heads // tensor_parallel)
        return 2 * 2 * self.layers * heads * self.head_size
