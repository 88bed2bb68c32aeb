from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig

from isotrain.models.config import positions

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def config(declared: int, **rope: Any) -> PretrainedConfig:
    return LlamaConfig(max_position_embeddings=declared, rope_parameters={"rope_theta": 1e6, **rope})


@pytest.mark.parametrize(
    ("found", "limit"),
    [
        (config(32768), 32768),
        (config(32768, **YARN), 131072),  # as Qwen's model cards tell users to write it
        (config(131072, **YARN), 131072),
        (config(163840, **(YARN | {"factor": 40.0, "original_max_position_embeddings": 4096})), 163840),
        (config(4096, rope_type="linear", factor=4.0), 16384),
        (config(4096, rope_type="dynamic", factor=4.0), 4096),
        (
            config(
                131072,
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
            131072,
        ),
        (
            config(
                131072,
                rope_type="longrope",
                short_factor=[1.0] * 64,
                long_factor=[2.0] * 64,
                factor=32.0,
                original_max_position_embeddings=4096,
            ),
            131072,
        ),
    ],
)
def test_the_limit_with_the_scaling(found: PretrainedConfig, limit: int) -> None:
    assert positions(found).limit == limit


def test_what_engines_are_told() -> None:
    """Some stretch the limit of a YaRN config, others take it for stretched."""
    assert positions(config(32768, **YARN)).config_changes == {"max_position_embeddings": 131072}
    for same in (config(131072, **YARN), config(4096, rope_type="linear", factor=4.0), config(32768)):
        assert positions(same).config_changes == {}


def test_the_old_name_of_the_type() -> None:
    old = LlamaConfig(
        max_position_embeddings=32768,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    )
    assert positions(old).limit == 131072


def test_a_scaling_per_kind_of_layer() -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    found = Gemma3TextConfig(max_position_embeddings=131072, rope_parameters=rope, num_hidden_layers=2)
    assert positions(found).limit == 131072


def test_models_without_positions() -> None:
    assert positions(PretrainedConfig()).limit is None
