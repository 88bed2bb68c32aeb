"""What every engine is made from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotrain.models.config import Positions
from isotrain.recipe.online import RolloutSection
from isotrain.rollout.build import EngineArguments
from isotrain.rollout.vllm import _reads_in_parts, prefill


@pytest.mark.parametrize(
    ("device", "written", "eager"),
    [("cpu", None, True), ("npu", None, False), ("cpu", False, False), ("npu", True, True)],
)
def test_engines_compile_where_it_pays_unless_told(device: str, written: bool | None, eager: bool) -> None:
    named: Any = SimpleNamespace(type=device)
    plan = EngineArguments(
        RolloutSection(eager=written), Path(), "float32", named, 1, Positions(None), 0, "e"
    )
    assert plan.eager is eager


@pytest.mark.parametrize("length", [512, 131_072])
def test_a_step_reads_a_bounded_part_of_the_prompts(length: int) -> None:
    """The memory of a step's activations is taken from the cache, whatever is the longest prompt."""
    platform = SimpleNamespace(is_cpu=lambda: False)
    assert prefill(length, in_parts=_reads_in_parts(platform)) == {
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 8192,
    }


def test_prompts_that_are_read_at_once_fit_into_a_step() -> None:
    host = SimpleNamespace(is_cpu=lambda: True)
    whole = prefill(131_072, in_parts=_reads_in_parts(host))
    assert whole == {"enable_chunked_prefill": False, "max_num_batched_tokens": 131_072}
    assert prefill(512, in_parts=False)["max_num_batched_tokens"] == 8192
