"""Values over packed samples are those of transformers' sequence classifier, sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    PreTrainedModel,
)

from isotrain.errors import ModelError
from isotrain.models.load import IMPLEMENTATIONS, build_scalar
from isotrain.models.packed import ScalarHead, ScalarModel

LENGTHS = (9, 1, 20, 4)
TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module")
def directory(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny / "model", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return path


def load(directory: Path, device: str, attention: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=IMPLEMENTATIONS[attention]
    )
    return model.eval().to(device)


def values(
    model: ScalarModel, device: str, wanted: Callable[[ScalarHead], torch.Tensor] = ScalarHead.values
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens_T = torch.randint(0, 60, (TOKENS,), generator=torch.Generator().manual_seed(0)).to(device)
    positions_T = torch.cat([torch.arange(length, device=device) for length in LENGTHS])
    everywhere_N = torch.arange(TOKENS, device=device)
    found_N = model(tokens_T, positions_T, LENGTHS, everywhere_N, tokens_T, wanted)
    return tokens_T, found_N


@pytest.mark.parametrize("attention", ["sdpa", "padded"])
def test_values_and_gradients_equal_transformers(directory: Path, device_type: str, attention: str) -> None:
    model = ScalarModel(load(directory, device_type, attention), attention)
    tokens_T, values_N = values(model, device_type)
    factor_N = torch.linspace(-1, 2, TOKENS, device=device_type)
    (values_N * factor_N).sum().backward()

    plain = load(directory, device_type, "padded")
    states = [plain.base_model(sample[None]).last_hidden_state[0] for sample in tokens_T.split(LENGTHS)]
    expected_N = plain.score(torch.cat(states))[:, 0]
    (expected_N * factor_N).sum().backward()
    assert values_N.dtype == torch.float32 and expected_N.abs().max() > 0.01
    torch.testing.assert_close(values_N, expected_N, rtol=0, atol=1e-5)
    for name, parameter in plain.named_parameters():
        found, expected = model.pretrained.get_parameter(name).grad, parameter.grad
        assert found is not None and expected is not None
        scale = float(expected.abs().max())
        torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("attention", ["sdpa", "padded"])
def test_logits_of_a_token_classifier_equal_transformers(
    tiny: Path, tmp_path: Path, device_type: str, attention: str
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny / "model", num_labels=2)
    saved = AutoModelForTokenClassification.from_config(config)
    torch.nn.init.normal_(saved.score.bias)
    saved.save_pretrained(tmp_path)
    plain, other = (
        AutoModelForTokenClassification.from_pretrained(
            tmp_path, dtype=torch.float32, attn_implementation=IMPLEMENTATIONS[kind]
        )
        .eval()
        .to(device_type)
        for kind in ("padded", attention)
    )
    tokens_T, found_NK = values(ScalarModel(other, attention), device_type, ScalarHead.logits)
    expected_NK = torch.cat([plain(sample[None]).logits[0] for sample in tokens_T.split(LENGTHS)])
    torch.testing.assert_close(found_NK, expected_NK, rtol=0, atol=1e-5)
    assert found_NK.shape == (TOKENS, 2)


def test_values_are_multiplied_in_float32(device_type: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(5, 64, generator=generator).to(device_type, torch.bfloat16)
    weight_KD = torch.randn(1, 64, generator=generator).to(device_type, torch.bfloat16)
    exact_N = (hidden_ND.cpu().double() @ weight_KD.cpu().double().t())[:, 0]
    found_N = ScalarHead(hidden_ND, weight_KD).values()
    assert found_N.dtype == torch.float32
    torch.testing.assert_close(found_N.cpu().double(), exact_N, rtol=1e-5, atol=1e-5)


def test_no_position_gives_a_zero_gradient(device_type: str) -> None:
    hidden_ND = torch.empty(0, 8, device=device_type, requires_grad=True)
    weight_KD = torch.ones(1, 8, device=device_type, requires_grad=True)
    total = ScalarHead(hidden_ND, weight_KD).values().sum()
    total.backward()
    assert total.item() == 0 and weight_KD.grad is not None and torch.equal(weight_KD.grad, weight_KD * 0)


def test_built_without_memory_from_a_language_model(tiny: Path) -> None:
    model = build_scalar(tiny / "model", "sdpa")
    assert all(p.is_meta and p.dtype == torch.float32 for p in model.parameters())
    assert model.get_parameter("score.weight").shape == (1, 64)


def test_a_model_type_with_another_head(tmp_path: Path) -> None:
    BertConfig(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1
    ).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="'bert' has no plain 'score' head"):
        build_scalar(tmp_path, "sdpa")
