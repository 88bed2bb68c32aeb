"""What models make of their heads' products, read from their own forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from isotrain.errors import ModelError
from isotrain.models.logits import PLAIN, LogitTransform, read_transform
from small_models import small_config


def empty_model(kind: str, **changes: Any) -> PreTrainedModel:
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(small_config(kind, **changes))
    return model


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {}, PLAIN),
        ("granite", {"logits_scaling": 1.0}, PLAIN),
        ("granite", {"logits_scaling": 8.0}, LogitTransform(0.125)),  # divides
        ("granitemoe", {"logits_scaling": 3.0}, LogitTransform(0.33333333)),
        ("cohere", {"logit_scale": 0.0625}, LogitTransform(0.0625)),  # multiplies
        ("cohere2", {"logit_scale": 0.3}, LogitTransform(0.3)),
        ("minicpm3", {"dim_model_base": 8}, LogitTransform(0.25)),  # scales the hidden states
        ("gemma2", {}, LogitTransform(cap=30.0)),
        ("gemma2", {"final_logit_softcapping": 12345.6}, LogitTransform(cap=12345.6)),
        ("gemma2", {"final_logit_softcapping": 0.01}, LogitTransform(cap=0.01)),
        ("gemma2", {"final_logit_softcapping": None}, PLAIN),
        ("gemma3", {"final_logit_softcapping": 30.0}, PLAIN),  # its composite class does not read it
        ("gemma3_text", {"final_logit_softcapping": 7.3}, LogitTransform(cap=7.3)),
        ("gemma4", {"final_logit_softcapping": 30.0}, LogitTransform(cap=30.0)),
    ],
)
def test_scale_and_cap_of_models(kind: str, changes: dict[str, Any], expected: LogitTransform) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    assert read_transform(empty_model(kind, **changes)) == expected


Change = Callable[[torch.Tensor], torch.Tensor]
LINEAR: Change = lambda x: 0.7 * x  # noqa: E731
CHANGES: dict[str, tuple[Change, LogitTransform | None]] = {
    "scale": (LINEAR, LogitTransform(0.7)),
    "scale in float32": (lambda x: LINEAR(x.float()), LogitTransform(0.7)),
    "negative scale": (lambda x: -x, LogitTransform(-1.0)),
    "scale and cap": (lambda x: 4 * torch.tanh(0.3 * x / 4), LogitTransform(0.3, 4.0)),
    "both in float32": (lambda x: 4 * torch.tanh(0.3 * x.float() / 4), LogitTransform(0.3, 4.0)),
    "cap, then scale": (lambda x: 0.3 * 4 * torch.tanh(x / 4), LogitTransform(0.3, 1.2)),
    "hard cap": (lambda x: x.clamp(-5, 5), None),
    "hard cap far away": (lambda x: x.clamp(-500, 500), None),
    "another soft cap": (lambda x: 4 * x / (4 + x.abs()), None),
    "cap of one side": (lambda x: torch.where(x > 0, 4 * torch.tanh(x / 4), x), None),
    "offset": (lambda x: x + 1e-3, None),
    "nearly plain": (lambda x: x + 1e-4 * x.sin(), None),
    "normalised": (lambda x: x.log_softmax(-1), None),
    "scale of each token": (lambda x: x * torch.arange(1, 8)[:, None], None),
    "scale of each output": (lambda x: x * torch.arange(1, x.shape[-1] + 1), None),
    "zero": (lambda x: 0 * x, None),
    "rounded": (lambda x: x.bfloat16(), None),
    "cut": (lambda x: x[..., :-1], None),
    "not a number": (lambda x: x / 0, None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_anything_but_a_scale_and_a_soft_cap_is_refused(name: str) -> None:
    change, expected = CHANGES[name]

    class Changed(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = change(output.logits)
            return output

    with init_empty_weights(include_buffers=False):
        model = Changed(small_config("llama"))
    if expected is None:
        with pytest.raises(ModelError, match=r"'llama' changes its logits \(in its forward\) by more than"):
            read_transform(model)
    else:
        transform = read_transform(model)
        assert transform.scale == pytest.approx(expected.scale, rel=1e-7)
        assert transform.cap == (None if expected.cap is None else pytest.approx(expected.cap, rel=1e-7))


def test_refuses_a_head_with_a_bias() -> None:
    with pytest.raises(ModelError, match="bias"):
        read_transform(empty_model("phi"))
