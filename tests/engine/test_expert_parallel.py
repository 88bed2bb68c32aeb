from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from isotrain.engine.build import split_experts
from isotrain.errors import ModelError


def model(kind: str, **plan: str) -> Any:
    return SimpleNamespace(config=AutoConfig.for_model(kind, num_experts=8), ep_plan=plan)


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ModelError, match=r"cannot split the experts of model type 'llama'; set it to 1"):
        split_experts(model("llama"), SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]


def test_experts_that_cannot_be_divided_are_refused() -> None:
    one = model("qwen3_moe", **{"model.layers.*.mlp.experts": "ep_dispatch_experts"})
    with pytest.raises(ModelError, match=r"8 experts cannot be divided by 3; set a divisor"):
        split_experts(one, SimpleNamespace(size=lambda: 3))  # type: ignore[arg-type]
