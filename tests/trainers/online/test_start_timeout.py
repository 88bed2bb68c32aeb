"""A start may take longer the more bytes of models there are to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotrain.recipe.online import ClusterSection
from isotrain.trainers.online.run import with_time_to_load


def test_large_models_have_more_time(tmp_path: Path) -> None:
    for name, size in (("policy", 140 * 10**9), ("reward", 10**9)):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "model.safetensors", "wb") as file:
            file.truncate(size)  # a hole: no block is written
    given = ClusterSection(start_timeout=600)
    policy, reward = tmp_path / "policy", tmp_path / "reward"
    assert with_time_to_load(given, []).start_timeout == 600
    assert with_time_to_load(given, [policy, reward]).start_timeout == pytest.approx(600 + 1400 + 10)
    assert with_time_to_load(given, [policy, policy]).start_timeout == pytest.approx(600 + 1400)
