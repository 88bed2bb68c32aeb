"""Until when `replace_rotation` is needed, and that it does what it says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import Qwen3Config
from transformers.integrations import hub_kernels
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from isotrain.models import fused
from isotrain.models.fused import replace_rotation, rotation_of

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def layer() -> nn.Module:
    config = Qwen3Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config._attn_implementation = "eager"
    return Qwen3Attention(config, layer_idx=0)


def test_the_versions_are_those_of_the_project() -> None:
    """Whoever lets a new version of transformers in looks at the patch, and at the next test."""
    found = re.search(r'"transformers>=(\d+)\.(\d+)[\d.]*,<(\d+)\.(\d+)"', PROJECT.read_text())
    assert found is not None
    numbers = tuple(map(int, found.groups()))
    assert (numbers[:2], numbers[2:]) == (fused.FIRST, fused.BELOW)


@pytest.mark.skipif(
    transformers.__version__ == "5.5.4", reason="the newest version tells whether it is needed"
)
def test_it_is_still_needed() -> None:
    """If this fails, transformers has a hook for the rotation: use it, and remove `replace_rotation`."""
    assert modeling_qwen3.apply_rotary_pos_emb is rotation_of(layer()), "called as a global of its module"
    assert not any("rot" in name for name in vars(layer())), "not called through the layer"
    if importlib.util.find_spec("kernels") is None:

        class Marked: ...

        assert hub_kernels.use_kernelized_func(lambda: None)(Marked) is Marked, "the hook does nothing"
        with pytest.raises(RuntimeError, match="requires `kernels`"):
            hub_kernels.register_kernel_mapping({})


def test_one_layer_is_changed() -> None:
    changed, other = layer(), layer()
    other.load_state_dict(changed.state_dict())
    calls = []

    def rotate(*arguments: torch.Tensor) -> object:
        calls.append(len(arguments))
        return modeling_qwen3.apply_rotary_pos_emb(*arguments)

    replace_rotation(changed, rotate)
    angle = torch.rand(1, 3, 8)
    states = torch.rand(1, 3, 32)
    results = [
        module(states, position_embeddings=(angle.cos(), angle.sin()), attention_mask=None)[0]
        for module in (changed, other)
    ]
    assert calls == [4] and torch.equal(*results)
    assert modeling_qwen3.apply_rotary_pos_emb.__module__ == modeling_qwen3.__name__


def test_what_is_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rotation_of(nn.Linear(1, 1)) is None
    assert rotation_of(layer()) is not None
    for version in ((5, 4), (5, 20), (6, 0)):
        monkeypatch.setattr(fused, "VERSION", version)
        assert rotation_of(layer()) is None
