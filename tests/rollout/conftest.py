"""What each engine was found to do, once for all tests that ask."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_children import CONTRACT, run_child

from support import python_of


@pytest.fixture(scope="session")
def vllm_found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_child(CONTRACT / "vllm_child.py", tmp_path_factory.mktemp("vllm"), "1", timeout=400)


@pytest.fixture(scope="session")
def sglang_found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("sglang")
    return run_child(CONTRACT / "sglang_child.py", work, python_of("sglang"), timeout=800)


@pytest.fixture(scope="session")
def hf_found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_child(CONTRACT / "hf_child.py", tmp_path_factory.mktemp("hf"), timeout=300)
