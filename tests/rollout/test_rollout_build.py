"""What every engine is made from."""

from __future__ import annotations

from dataclasses import make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotrain.errors import RolloutError
from isotrain.models.config import Positions
from isotrain.recipe.online import RolloutSection
from isotrain.rollout.build import ENGINES, EngineArguments
from isotrain.rollout.vllm import _check_options, _reads_in_parts, prefill


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


def arguments(device: str, name: str, repeatable: bool) -> EngineArguments:
    named: Any = SimpleNamespace(type=device)
    return EngineArguments(
        RolloutSection(), Path(), "float32", named, 1, Positions(None), 7, name, repeatable
    )


def test_responses_have_seeds_only_where_they_must_be_repeatable() -> None:
    """On the host a seed costs nothing that can be measured; on a device it is kernels for each response."""
    assert arguments("npu", "engine 0", True).seeded and arguments("cpu", "engine 0", False).seeded
    assert not arguments("npu", "engine 0", False).seeded


def test_pictures_are_refused_where_they_would_not_be_seen() -> None:
    plan = replace(arguments("cpu", "engine 0", True), pictures=1)
    with pytest.raises(RolloutError, match="sglang is not given pictures yet; set vllm or hf"):
        ENGINES["sglang"](plan)


def test_engines_without_seeds_of_responses_do_not_share_their_noise() -> None:
    seeds = [arguments("npu", f"engine {index}", False).engine_seed for index in range(8)]
    assert len(set(seeds)) == 8 and all(0 <= seed < 2**31 for seed in seeds)
    assert seeds[0] == arguments("npu", "engine 0", False).engine_seed
    assert arguments("npu", "engine 3", True).engine_seed == 7


def test_refuses_options_that_the_installed_vllm_does_not_have() -> None:
    arguments = make_dataclass("EngineArgs", ["max_num_seqs"])
    installed = SimpleNamespace(EngineArgs=arguments, __version__="0.23.0")
    _check_options({"max_num_seqs": 8}, installed)
    with pytest.raises(RolloutError, match=r"engine_options\.block_size: vLLM 0\.23\.0 has no such option"):
        _check_options({"max_num_seqs": 8, "block_size": 16}, installed)


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
