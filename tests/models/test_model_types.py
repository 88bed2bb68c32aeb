"""Packed log-probs of many model types equal those of transformers' own forward, or the type is refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from isotrain.device.detect import choose_device
from isotrain.engine.build import build_engine
from isotrain.engine.world import join_world
from isotrain.errors import ModelError
from isotrain.models.config import text_config
from isotrain.models.packed import Backbone
from isotrain.models.weights import shard_of
from isotrain.recipe.schema import ModelSection, OptimizerSection
from small_models import save_small, small_config

LENGTHS = (9, 1, 20, 4)

# Those that `small_models` cannot make small, or that need packages that are not installed here.
NOT_SMALL = {
    *("blt", "cohere_compass_text", "dbrx", "dots1", "falcon_h1", "gemma3n", "gemma4_assistant"),
    *("gemma4_unified_assistant", "gpt_neo", "lfm2_moe", "mamba2", "musicgen", "musicgen_melody"),
    *("qwen4_exp", "qwen4_exp_text", "reformer", "roc_bert", "xmod", "zamba", "zamba2", "zaya"),
}
# Its routers draw experts at random while it trains.
RANDOM_IN_TRAINING = {"phimoe"}


def tokens() -> torch.Tensor:
    return torch.randint(3, 50, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


class Outcome(NamedTuple):
    frozen_N: torch.Tensor
    """Log-probs of a model that does not train."""
    trained_N: torch.Tensor
    gradients: dict[str, torch.Tensor]
    """Of the sum of the log-probs."""


def gradients_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Parts that text does not pass through, such as those for images, have none."""
    return {
        name.removeprefix(Backbone.prefix): shard_of(p.grad).local.cpu()
        for name, p in parameters
        if p.grad is not None
    }


def by_transformers(model: PreTrainedModel) -> Outcome:
    """The model's own, one sample at a time."""
    model.zero_grad()
    if getattr(text_config(model), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # its SDPA leaves the soft cap out, and says nothing
    logps = []
    for sample_T in tokens().split(LENGTHS):
        logits_TV = model(input_ids=sample_T[None], use_cache=False).logits[0, :-1].float()
        logps.append(logits_TV.log_softmax(-1).gather(1, sample_T[1:, None])[:, 0])
    logp_N = torch.cat(logps)
    logp_N.sum().backward()
    return Outcome(logp_N.detach(), logp_N.detach(), gradients_of(model.named_parameters()))


def by_engine(directory: Path, device_type: str, attention: str) -> Outcome:
    """Ours of all samples in one pack."""
    device = choose_device(device_type)
    values = {"path": str(directory), "dtype": "float32", "attention": attention, "fused": "auto"}
    starts = [sum(LENGTHS[:index]) for index in range(len(LENGTHS))]
    predict = [torch.arange(start, start + length - 1) for start, length in zip(starts, LENGTHS, strict=True)]
    predict_N = torch.cat(predict)
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    with join_world(device) as world:
        section = ModelSection.model_validate(values)
        engine = build_engine(section, OptimizerSection(), device=device, world=world, seed=0)
        inputs = [x.to(world.device) for x in (predict_N, tokens()[predict_N + 1])]
        pack = (tokens().to(world.device), positions_T.to(world.device), LENGTHS)
        with torch.no_grad():
            frozen_N = engine.model.eval()(*pack, *inputs, lambda head: head.logps())
        trained_N = engine.model.train()(*pack, *inputs, lambda head: head.logps())
        trained_N.sum().backward()
        gradients = gradients_of(engine.model.named_parameters())
    return Outcome(frozen_N.cpu(), trained_N.detach().cpu(), gradients)


def assert_same(
    directory: Path, model: PreTrainedModel, device_type: str, attention: str, tolerance: float = 1e-4
) -> None:
    ours = by_engine(directory, device_type, attention)
    expected = by_transformers(model)
    assert expected.frozen_N.std() > 0.1, "a model that gives all tokens the same shows nothing"
    torch.testing.assert_close(ours.frozen_N, expected.frozen_N, rtol=0, atol=tolerance)
    if text_config(model).model_type in RANDOM_IN_TRAINING:
        return
    torch.testing.assert_close(ours.trained_N, expected.trained_N, rtol=0, atol=tolerance)
    assert ours.gradients.keys() == expected.gradients.keys() and len(ours.gradients) > 4
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        # Some, as that of a key's bias, are 0 but for rounding.
        allowed = 1e-3 * float(gradient.abs().max()) + 1e-6 * largest
        assert float((ours.gradients[name] - gradient).abs().max()) <= allowed, name


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("llama", "auto"),
        ("gemma3", "auto"),  # composite, with windows
        ("deepseek_v3", "auto"),
        ("doge", "padded"),
        ("nemotron", "padded"),
    ],
)
def test_log_probs_are_those_of_transformers(
    tmp_path: Path, device_type: str, kind: str, attention: str
) -> None:
    if kind == "gemma3" and transformers.__version__ == "5.5.4":
        pytest.skip("this version trains Gemma 3 only with token types, and says so")
    assert_same(tmp_path, save_small(kind, tmp_path), device_type, attention)


CAPPED = {"final_logit_softcapping": 3.0}


@pytest.mark.parametrize(
    ("kind", "changes", "attention"),
    [
        ("gemma2", {**CAPPED, "attn_logit_softcapping": 1.0}, "auto"),
        ("gemma2", {**CAPPED, "attn_logit_softcapping": 1.0}, "padded"),
        ("gemma3_text", CAPPED, "auto"),
        ("gemma4", CAPPED, "auto"),  # composite
        ("gemma4_text", CAPPED, "auto"),
        ("cohere", {"logit_scale": 0.3}, "auto"),
        ("cohere2", {"logit_scale": 0.3}, "auto"),
        ("granite", {"logits_scaling": 3.0}, "auto"),
        ("granitemoe", {"logits_scaling": 3.0}, "auto"),
        ("qwen3_next", {}, "auto"),  # recurrent layers beside attention
        ("qwen3_next", {}, "padded"),
        ("qwen3_5_text", {}, "auto"),
    ],
)
def test_capped_and_hybrid_models_are_those_of_transformers(
    tmp_path: Path, device_type: str, kind: str, changes: dict[str, Any], attention: str
) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    model = save_small(kind, tmp_path, **changes)
    if kind in ("qwen3_next", "qwen3_5_text") and attention == "auto" and transformers.__version__ == "5.5.4":
        # This version does not tell recurrent layers where samples begin.
        with pytest.raises(ModelError, match=r"where packed samples begin; set model\.attention=padded"):
            by_engine(tmp_path, device_type, attention)
        return
    assert_same(tmp_path, model, device_type, attention, tolerance=1e-5)


def test_flash_attention_is_told_where_samples_begin(tmp_path: Path) -> None:
    assert_same(tmp_path, save_small("llama", tmp_path), "npu", "flash")
    save_small("nemotron", tmp_path)
    with pytest.raises(ModelError, match=r"'nemotron' does not (tell|take) .*set model\.attention=padded"):
        by_engine(tmp_path, "npu", "flash")


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "inkling_text": ({"unpadded_vocab_size": 60}, "padded", r"changes its logits \(unpadded_vocab_size, "),
    "doge": ({}, "auto", r"'doge' has an attention mask of its own, .*; set model\.(attention|fused)="),
    "nemotron": (
        {},
        "auto",
        # The older version of the Ascend stack cannot build it at all.
        r"'nemotron' does not tell its attention where .*model\.attention=padded|cannot build a causal",
    ),
    "gpt_oss": ({}, "auto", r"'gpt_oss' uses 's_aux', .*; set model\.(attention|fused)="),
    "llama4_text": ({}, "padded", "cannot be run without its head"),
    "jetmoe": ({}, "auto", r"model\.gradient_checkpointing: .*; set it to false"),
    "llava": ({}, "auto", "cannot build a causal language model"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_types_that_would_train_wrongly_are_refused(tmp_path: Path, device_type: str, kind: str) -> None:
    changes, attention, reason = REFUSED[kind]
    if kind not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        save_small(kind, tmp_path, **changes)
    else:
        small_config(kind).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        by_engine(tmp_path, device_type, attention)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_type_is_right_or_refused(tmp_path: Path, kind: str) -> None:
    try:
        model = save_small(kind, tmp_path)
        by_transformers(model)
    except Exception as error:
        assert kind in NOT_SMALL, f"{type(error).__name__}: {error}"
        pytest.skip(f"cannot be made small: {error}")
    for device_type, attention in (("cpu", "auto"), ("cpu", "padded"), ("npu", "auto")):
        try:
            assert_same(tmp_path, model, device_type, attention)
        except ModelError as refusal:
            reasons = ("set ", "not supported", "cannot build", "no language-model head")
            assert any(reason in str(refusal) for reason in reasons)
