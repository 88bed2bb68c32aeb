"""What vLLM is told on Ascend."""

from __future__ import annotations

import os
from unittest.mock import patch

from isotrain.rollout.vllm import CAPTURED, _set_environment, few_graphs, npu_environment


def test_nz_is_always_off() -> None:
    for there in ({}, {"VLLM_ASCEND_ENABLE_NZ": "1"}):
        assert npu_environment(there)["VLLM_ASCEND_ENABLE_NZ"] == "0"


def test_expandable_segments_are_taken_out() -> None:
    changed = npu_environment({"PYTORCH_NPU_ALLOC_CONF": "page_size:1g, expandable_segments:True"})
    assert changed["PYTORCH_NPU_ALLOC_CONF"] == "page_size:1g"
    assert npu_environment({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})["PYTORCH_ALLOC_CONF"] == ""
    assert "PYTORCH_NPU_ALLOC_CONF" not in npu_environment({"PYTORCH_NPU_ALLOC_CONF": "page_size:1g"})


def test_the_engine_chooses_free_ports() -> None:
    with patch.dict(os.environ, {"HCCL_NPU_SOCKET_PORT_RANGE": "61000-61050"}, clear=True):
        _set_environment("npu")
        assert os.environ["HCCL_HOST_SOCKET_PORT_RANGE"] == "auto"
        assert os.environ["HCCL_NPU_SOCKET_PORT_RANGE"] == "61000-61050"  # the user's
    with patch.dict(os.environ, {}, clear=True):
        _set_environment("cuda")
        assert not any(name.startswith("HCCL_") for name in os.environ)


def test_few_graphs_are_captured_unless_the_recipe_says_which() -> None:
    """Beside ranks, whose collectives take streams too, vLLM's own sizes can be too many."""
    chosen = few_graphs("npu", False, {})["compilation_config"]
    assert chosen["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert tuple(chosen["cudagraph_capture_sizes"]) == CAPTURED and len(CAPTURED) == 12
    sizes = few_graphs("npu", False, {"max_num_seqs": 40})["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes == [1, 2, 4, 8, 16, 32, 40]
    given = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    assert not few_graphs("npu", False, given)
    assert not few_graphs("npu", True, {}) and not few_graphs("cuda", False, {})
