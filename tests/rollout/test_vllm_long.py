"""Long prompts in a real vLLM: beyond a model's own limit with YaRN, and read in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollout_children import run_child

from support import needs_vllm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    needs_vllm,
]

CHILD = Path(__file__).with_name("vllm_long_child.py")


@pytest.mark.parametrize(("how", "batched"), [("at_once", 256), ("in_parts", 48)])
def test_log_probs_of_long_prompts(tmp_path: Path, how: str, batched: int) -> None:
    found = run_child(CHILD, tmp_path, how, timeout=300)
    assert found["batched"] == batched
    assert found["difference"] < 1e-4
    # 581 tokens: 48 in each step make 13 or more.
    assert found["steps"] >= 13 if how == "in_parts" else found["steps"] <= 6
