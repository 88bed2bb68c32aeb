"""What vLLM does beyond the contract of all engines, and the contract with two workers or another vLLM."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from contract_rows import BAD, TOLERANCE, check_bad_update, check_listening, check_same_weights
from rollout_children import CONTRACT, run_child

from support import needs_vllm

pytestmark = [pytest.mark.vllm, needs_vllm]


def test_what_is_missing_in_an_update_is_named(vllm_found: dict[str, Any]) -> None:
    for name, part in {
        "without self_attn.k_proj": "lacks weights of 2 of 14 parameters: model.layers.0.self_attn.qkv_proj",
        "without mlp.up_proj": "model.layers.0.mlp.gate_up_proj.weight",
        "without model.norm": "lacks weights of 1 of 14 parameters: model.norm.weight",
    }.items():
        assert part in vllm_found["bad"][name]["error"]


def test_what_a_worker_reports_is_compared(vllm_found: dict[str, Any]) -> None:
    reports = vllm_found["reports"]
    assert reports["digest"].startswith(
        "WeightUpdateError: engine 7: worker 0 reports digest of another file"
    )
    assert reports["tensors"].startswith("WeightUpdateError: engine 7: worker 0 reports tensors 3 after")


def test_every_tensor_that_is_not_written_is_named(vllm_found: dict[str, Any]) -> None:
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    stale = vllm_found["stale"]
    assert "did not write 1 of 14 tensors: lm_head.weight;" in stale.pop("packed head")
    assert len(stale) == 20
    for name, error in stale.items():
        *parents, layer, kind = name.split(".")
        inside = ".".join([*parents, fused.get(layer, layer), kind])
        assert re.search(rf"engine 7: weight update \d+ did not write . of 14 tensors: .*{inside}", error), (
            name
        )
    assert vllm_found["after_stale"] < TOLERANCE


def test_weights_that_are_sent(vllm_found: dict[str, Any]) -> None:
    check_sent(vllm_found)


def check_sent(found: dict[str, Any]) -> None:
    sent, (error, sender, refused) = found["sent"], found["half"]
    assert sent["tensors"][0] == sent["tensors"][1] and sent["versions"][0] == sent["versions"][1]
    assert sent["difference"] < 1e-4
    assert "the sender aborted weight update" in error and "ValueError('no more')" in error
    assert sender == "ValueError('no more')"
    assert "does not generate" in refused
    assert found["after_half"] < 1e-4  # the next update makes it usable again


def test_weights_wait_in_a_second_buffer(vllm_found: dict[str, Any]) -> None:
    check_buffered(vllm_found)


def check_buffered(found: dict[str, Any]) -> None:
    at_that_time, before = found["buffered"]["while"]
    assert at_that_time == before
    assert found["buffered"]["versions"][0] == found["buffered"]["versions"][1]
    assert found["buffered"]["difference"] < 1e-4


def test_an_abandoned_iterator_leaves_nothing_running(vllm_found: dict[str, Any]) -> None:
    assert vllm_found["left"] == [0, 0]


def test_it_refuses_other_devices(vllm_found: dict[str, Any]) -> None:
    assert "is for cpu, but device.type is" in vllm_found["other_device"]


@pytest.mark.slow
def test_two_workers(tmp_path: Path) -> None:
    """Tensor parallel 2, and a head that is not tied to the embedding."""
    found = run_child(CONTRACT / "vllm_child.py", tmp_path, "2", timeout=500)
    check_same_weights(found)
    check_listening(found)
    for name in BAD:
        check_bad_update(found, name)
    assert found["responses"]["same_alone"] and found["responses"]["greedy_is_best"]
    check_sent(found)
    check_buffered(found)
    assert found["processes"] >= 3
    assert found["left"] == [0, 0]


@pytest.mark.slow
def test_another_version_of_vllm(tmp_path: Path) -> None:
    """All but where it listens: before 0.32, vLLM's workers meet on all interfaces."""
    python = os.environ.get("ISOTRAIN_OTHER_VLLM")
    if python is None:
        pytest.skip("set ISOTRAIN_OTHER_VLLM to the Python of an environment with another vLLM, such as 0.23")
    found = run_child(CONTRACT / "vllm_child.py", tmp_path, "1", timeout=500, python=python)
    check_same_weights(found)
    for name in BAD:
        check_bad_update(found, name)
    assert found["responses"]["same_alone"] and found["responses"]["greedy_is_best"]
    assert found["left"] == [0, 0]


@pytest.mark.slow
def test_a_mixture_s_experts_are_updated(tmp_path: Path) -> None:
    child = Path(__file__).with_name("vllm_mixture_child.py")
    found = run_child(child, tmp_path, "qwen3_moe", timeout=300)
    print(f"mean differences of log-probs: {found['differences']}")
    assert max(found["differences"]) <= TOLERANCE and min(found["moved"]) > 0.1
    assert "lacks weights" in found["refused"] and "experts" in found["refused"]
