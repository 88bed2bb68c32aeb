"""What composite models say of their language model is found, whatever asks for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Gemma3Config, Gemma4Config, PretrainedConfig, Qwen2_5_VLConfig
from transformers.models.qwen3_vl_moe import Qwen3VLMoeConfig

from isotrain.device.detect import choose_device
from isotrain.engine.build import choose_attention
from isotrain.errors import ModelError
from isotrain.models.config import (
    AttentionShape,
    active_experts,
    attention_shapes,
    chosen_experts,
    has_window,
    layer_kinds,
    model_end_tokens,
    number_of_experts,
    text_config,
    training_flops,
    vocabulary_size,
)
from isotrain.recipe.schema import ModelSection, Recipe
from isotrain.tools.plan.estimate import Shape
from isotrain.tools.plan.memory import with_layers
from small_models import small_config


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl_moe"])
def test_a_composite_model_says_what_its_language_model_does(kind: str) -> None:
    whole = small_config(kind)
    text = text_config(whole)
    assert text is not whole and text_config(text) is text
    for ask in (
        attention_shapes,
        has_window,
        layer_kinds,
        vocabulary_size,
        number_of_experts,
        active_experts,
    ):
        assert ask(whole) == ask(text)
    assert vocabulary_size(whole) == 64
    assert {shape.query_heads for shape in attention_shapes(whole)} == {4}
    lengths = [3, 5]
    assert training_flops(10, 10, whole, lengths) == training_flops(10, 10, text, lengths) > 0


def test_finds_windows_of_composite_models() -> None:
    assert has_window(Gemma3Config()) and has_window(Gemma4Config())
    assert not has_window(Qwen2_5_VLConfig()) and not has_window(PretrainedConfig(num_hidden_layers=2))


@pytest.mark.skipif(not hasattr(PretrainedConfig, "per_layer_config"), reason="transformers is older")
def test_finds_a_window_that_only_some_layers_have() -> None:
    config = small_config("mistral", sliding_window=None)
    assert not has_window(config)
    config.per_layer_config = {1: {"sliding_window": 5}}
    assert has_window(config)


@pytest.mark.parametrize("fused", ["auto", "off"])
def test_attention_of_a_composite_model_with_windows(tmp_path: Path, fused: str) -> None:
    """On a device whose fused and flash operators have none."""
    small_config("gemma3").save_pretrained(tmp_path)
    npu = choose_device("npu")
    values = {"path": str(tmp_path), "fused": fused, "dtype": "bfloat16"}
    assert choose_attention(tmp_path, ModelSection.model_validate(values), npu) == "sdpa"
    with pytest.raises(ModelError, match="ignores this model's sliding window"):
        choose_attention(tmp_path, ModelSection.model_validate({**values, "attention": "flash"}), npu)


@pytest.mark.skipif(not hasattr(PretrainedConfig, "per_layer_config"), reason="transformers is older")
def test_counts_layers_of_different_shapes() -> None:
    """Full attention of Gemma 4 has larger heads than that with a window."""
    config = small_config("gemma4_text", global_head_dim=16, num_kv_shared_layers=0)
    kinds = {"sliding_attention": 8, "full_attention": 16}
    assert [shape.head_size for shape in attention_shapes(config)] == [kinds[k] for k in config.layer_types]
    width = 4 * sum(kinds[k] for k in config.layer_types)
    assert training_flops(0, 0, config, [10]) == 6 * width * 100


def test_experts_of_a_composite_model() -> None:
    config = Qwen3VLMoeConfig(text_config={"num_experts": 12, "num_experts_per_tok": 3})
    assert (number_of_experts(config), chosen_experts(config), active_experts(config)) == (12, 3, 0.25)
    dense = small_config("gemma3")
    assert (number_of_experts(dense), chosen_experts(dense), active_experts(dense)) == (0, 0, 1.0)


def test_a_mixture_that_does_not_say_how_many_experts_it_chooses() -> None:
    with pytest.raises(ModelError, match="'odd' does not say how many experts a token has"):
        active_experts(PretrainedConfig(num_experts=4, model_type="odd"))


def test_the_end_of_a_composite_models_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [7, 8]}}))
    assert model_end_tokens(tmp_path) == (7, 8)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5, "text_config": {"eos_token_id": 7}}))
    assert model_end_tokens(tmp_path) == (5,)


def test_a_plan_takes_layers_off_the_language_model(tmp_path: Path) -> None:
    source, fewer = tmp_path / "source", tmp_path / "fewer"
    whole = small_config("gemma3")
    whole.save_pretrained(source)
    fewer.mkdir()
    values = {"name": "run", "output": str(tmp_path), "algorithm": {"name": "sft"}, "data": {"train": "rows"}}
    recipe = Recipe.model_validate({**values, "model": {"path": str(source)}})
    path = Path(with_layers(recipe, 2, fewer).model.path)
    assert Shape.of(source).attention == [AttentionShape(4, 2, 8)] * 4
    assert Shape.of(path).layers == 2
    assert Shape.of(path).cache_bytes(1, 2) * 2 == Shape.of(source).cache_bytes(1, 2) == 2 * 2 * 4 * 2 * 8
