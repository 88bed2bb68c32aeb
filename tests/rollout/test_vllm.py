"""vLLM as an engine, in a child process, because this one has a simulated device that vLLM must not see."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import isotrain

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

CHILD = Path(__file__).with_name("vllm_child.py")
TOLERANCE = 1e-4
BAD = (
    "truncated",
    "flipped",
    "not delivered",
    "without self_attn.k_proj",
    "without mlp.up_proj",
    "without model.norm",
    "without input_layernorm",
    "without embed_tokens",
    "skipped",
    "wrong shape",
)


def run_child(
    work: Path, argument: int | str, timeout: float, python: str = sys.executable, child: Path = CHILD
) -> dict[str, Any]:
    """Everything that one engine can show; starting it is what takes the time."""
    # An interpreter of another environment has what isotrain needs, but not isotrain.
    source = {"PYTHONPATH": str(Path(isotrain.__file__).parents[1])}
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("NPU_SIM")}
    done = subprocess.run(
        [python, str(child), str(work), str(argument)],
        env={**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **source},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_child(tmp_path_factory.mktemp("vllm"), 1, 300)


def check_same_weights(found: dict[str, Any]) -> None:
    updates = found["updates"]
    assert len(updates) == 10
    worst = {kind: max(update[kind] for update in updates) for kind in ("sampled", "probed")}
    print(f"largest mean difference of log-probs over {len(updates)} updates: {worst}")
    assert max(worst.values()) <= TOLERANCE
    for update in updates:
        assert update["versions"] == [update["version"]] == [update["expected"]]
        assert all(update["lengths"])


def check_bad_update(found: dict[str, Any], name: str) -> None:
    bad = found["bad"][name]
    assert bad["error"].startswith("WeightUpdateError: engine 7: ")
    assert bad["seconds"] < 20
    assert bad["refused"].startswith("RolloutError: engine 7 does not generate: ")
    assert bad["version_kept"]
    assert bad["difference_after"] <= TOLERANCE


def check_listening(found: dict[str, Any]) -> None:
    assert {address.rpartition(":")[0] for address in found["listening"]} <= {"127.0.0.1", "[::1]"}


def test_the_same_weights_give_the_same_log_probs(found: dict[str, Any]) -> None:
    check_same_weights(found)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_update_is_caught_and_the_next_good_one_taken(found: dict[str, Any], name: str) -> None:
    check_bad_update(found, name)


def test_what_is_wrong_with_an_update_is_said(found: dict[str, Any]) -> None:
    for name, part in {
        "truncated": "bytes of tensors",
        "flipped": "is damaged: digest",
        "not delivered": "was announced but is not there",
        "without self_attn.k_proj": "lacks weights of 2 of 14 parameters: model.layers.0.self_attn.qkv_proj",
        "without mlp.up_proj": "model.layers.0.mlp.gate_up_proj.weight",
        "without model.norm": "lacks weights of 1 of 14 parameters: model.norm.weight",
        "skipped": "the file holds version",
    }.items():
        assert part in found["bad"][name]["error"]


def test_what_a_worker_reports_is_compared(found: dict[str, Any]) -> None:
    reports = found["reports"]
    assert reports["digest"].startswith(
        "WeightUpdateError: engine 7: worker 0 reports digest of another file"
    )
    assert reports["tensors"].startswith("WeightUpdateError: engine 7: worker 0 reports tensors 3 after")


def test_responses(found: dict[str, Any]) -> None:
    responses = found["responses"]
    assert responses["count"] == responses["distinct"] == 16
    assert responses["same_alone"]  # by seed, whatever shares the batch
    assert responses["prompts_kept"]


def test_greedy(found: dict[str, Any]) -> None:
    responses = found["responses"]
    assert responses["greedy_is_best"] and responses["greedy_pairs_equal"]
    assert responses["greedy_difference"] <= TOLERANCE


def test_log_probs_are_of_the_distribution_that_was_sampled(found: dict[str, Any]) -> None:
    assert found["responses"]["top_k_1_logp"] == 0  # the only token left is certain
    assert found["uniform"]["logp_error"] < 1e-5


def test_ends(found: dict[str, Any]) -> None:
    uniform = found["uniform"]
    assert 0 < sum(uniform["finished"]) < len(uniform["finished"])
    assert uniform["finished"] == uniform["last_is_end"]
    assert uniform["inner_ends"] == 0
    cut = [n for n, finished in zip(uniform["lengths"], uniform["finished"], strict=True) if not finished]
    assert set(cut) == {60}
    assert min(uniform["lengths"]) < 60


def test_an_abandoned_iterator_leaves_nothing_running(found: dict[str, Any]) -> None:
    abandoned = found["abandoned"]
    assert "is generating" in abandoned["second"]
    assert abandoned["update"].startswith("WeightUpdateError: engine 7 is generating")
    assert (abandoned["left"], abandoned["scheduled"], abandoned["after"]) == (0, 0, 4)


def test_it_listens_on_the_loopback_only(found: dict[str, Any]) -> None:
    check_listening(found)


def test_it_refuses_other_devices(found: dict[str, Any]) -> None:
    assert "is for cpu, but device.type is" in found["other_device"]


@pytest.mark.slow
def test_two_workers(tmp_path: Path) -> None:
    """Tensor parallel 2, and a head that is not tied to the embedding."""
    found = run_child(tmp_path, 2, 500)
    check_same_weights(found)
    check_listening(found)
    for name in BAD:
        check_bad_update(found, name)
    assert found["responses"]["same_alone"] and found["responses"]["greedy_is_best"]
    assert found["processes"] >= 3
    assert found["abandoned"]["scheduled"] == 0


@pytest.mark.slow
def test_another_version_of_vllm(tmp_path: Path) -> None:
    """All but where it listens: before 0.32, vLLM's workers meet on all interfaces."""
    python = os.environ.get("ISOTRAIN_OTHER_VLLM")
    if python is None:
        pytest.skip("set ISOTRAIN_OTHER_VLLM to the Python of an environment with another vLLM, such as 0.23")
    found = run_child(tmp_path, 1, 500, python)
    check_same_weights(found)
    for name in BAD:
        check_bad_update(found, name)
    assert found["responses"]["same_alone"] and found["responses"]["greedy_is_best"]
    assert found["abandoned"]["scheduled"] == 0


@pytest.mark.slow
def test_a_mixture_s_experts_are_updated(tmp_path: Path) -> None:
    found = run_child(tmp_path, "qwen3_moe", 300, child=CHILD.with_name("vllm_mixture_child.py"))
    print(f"mean differences of log-probs: {found['differences']}")
    assert max(found["differences"]) <= TOLERANCE and min(found["moved"]) > 0.1
    assert "lacks weights" in found["refused"] and "experts" in found["refused"]
