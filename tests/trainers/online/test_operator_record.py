"""The first update of an online run leaves its operators' errors."""

from __future__ import annotations

import json
from pathlib import Path

from hand_made_step import step_recipe, take_step


def test_the_first_update_is_recorded_once(tiny: Path, tmp_path: Path, device_type: str) -> None:
    algorithm = {"name": "grpo", "mini_batch_size": 2}
    own = {"algorithm": algorithm, "observe": {"operators": True}}
    step = take_step(step_recipe(tiny, tmp_path / "watched", device_type, **own))
    assert len(step.policy) == 2
    content = json.loads((tmp_path / "watched" / "layer_trace" / "operators.json").read_text())
    assert content["device"] == device_type and content["no_oracle"] == []
    calls = {row["operator"]: row["calls"] for row in content["operators"]}
    assert "aten.silu_backward.default" in calls
    assert sum(n for name, n in calls.items() if "_foreach_norm" in name) == 1
    assert all(row["non_finite"] == 0 for row in content["operators"])
    plain = take_step(step_recipe(tiny, tmp_path / "plain", device_type, algorithm=algorithm))
    assert [result for _, result in plain.policy] == [result for _, result in step.policy]
