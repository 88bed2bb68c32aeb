from __future__ import annotations

import pytest
import transformers

from isotrain.tools.probes.score_tests.families import (
    UnknownError,
    attention_constants,
    norm_constants,
    rope_constants,
)

SMALL = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
Config = transformers.AutoConfig


def test_constants_come_from_the_config() -> None:
    llama = Config.for_model("llama", **SMALL, rms_norm_eps=1e-5)
    assert norm_constants(llama, "model.layers.0.input_layernorm").epsilon == 1e-5
    attention = attention_constants(llama, 1)
    assert attention.scale == pytest.approx(32**-0.5) and attention.window is None
    assert attention.query_norm is None and rope_constants(llama, None).base == 10000.0
    qwen = Config.for_model("qwen3", **SMALL, head_dim=16)
    assert attention_constants(qwen, 0).query_norm == "tokens"
    assert attention_constants(qwen, 0).scale == 0.25 and rope_constants(qwen, None).head_size == 16


def test_windows_come_from_the_config() -> None:
    mistral = Config.for_model("mistral", **SMALL, sliding_window=5)
    assert attention_constants(mistral, 0).window == 5
    kinds = ["sliding_attention", "full_attention"]
    gemma = Config.for_model("gemma3_text", **SMALL, head_dim=16, layer_types=kinds, sliding_window=7)
    assert [attention_constants(gemma, layer).window for layer in (0, 1)] == [7, None]
    assert attention_constants(gemma, 0).scale == gemma.query_pre_attn_scalar**-0.5
    assert norm_constants(gemma, "model.norm").adds_one
    bases = [rope_constants(gemma, kind).base for kind in kinds]
    assert bases == [gemma.rope_parameters[kind]["rope_theta"] for kind in kinds] and bases[0] != bases[1]


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("granite", {}, "model type 'granite'"),
        ("gemma2", {"attn_logit_softcapping": 50.0}, "caps its scores"),
        ("llama", {"attention_dropout": 0.1}, "dropout"),
    ],
)
def test_what_is_not_known_is_not_tested(kind: str, options: dict[str, float], why: str) -> None:
    with pytest.raises(UnknownError, match=why):
        attention_constants(Config.for_model(kind, **SMALL, **options), 0)


def test_refuses_unknown_norms_and_rotations() -> None:
    with pytest.raises(UnknownError, match="does not state"):
        norm_constants(Config.for_model("llama", **SMALL), "model.layers.0.self_attn.q_a_layernorm")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    with pytest.raises(UnknownError, match="'yarn'"):
        rope_constants(Config.for_model("llama", **SMALL, rope_parameters=yarn), None)
