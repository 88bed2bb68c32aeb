"""What every engine is made from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotrain.recipe.online import RolloutSection
from isotrain.rollout.build import Plan


@pytest.mark.parametrize(
    ("device", "written", "eager"),
    [("cpu", None, True), ("npu", None, False), ("cpu", False, False), ("npu", True, True)],
)
def test_engines_compile_where_it_pays_unless_told(device: str, written: bool | None, eager: bool) -> None:
    named: Any = SimpleNamespace(type=device)
    plan = Plan(RolloutSection(eager=written), Path(), "float32", named, 1, None, 0, "e")
    assert plan.eager is eager
