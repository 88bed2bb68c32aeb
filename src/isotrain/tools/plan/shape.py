"""What a plan must know of a model: its configuration, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from isotrain.errors import ModelError
from isotrain.models.config import AttentionShape, attention_shapes
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
    attention: list[AttentionShape]
    """Of each layer."""

    @classmethod
    def of(cls, directory: Path) -> Shape:
        config = read_config(directory)
        return cls(config, attention_shapes(config))

    @property
    def layers(self) -> int:
        return len(self.attention)

    def cache_bytes(self, tensor_parallel: int, element_bytes: int) -> int:
        """Of one token on one device of an engine: keys and values of all layers."""
        heads = (max(1, layer.key_heads // tensor_parallel) * layer.head_size for layer in self.attention)
        return 2 * element_bytes * sum(heads)
