"""The stage of two machines, over two Ray nodes that stand for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from isotrain.tools.doctor.self_test.run import SelfTest, part_of
from isotrain.tools.doctor.self_test.stages import DEVICES
from isotrain.tools.doctor.self_test.verdicts import SelfTestSetting
from ray_machines import two_machines


@pytest.mark.slow
@pytest.mark.ray
def test_the_stage_of_two_machines_passes_on_two(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    with two_machines(object_store_memory=200 << 20) as machines:
        setting = SelfTestSetting(
            device="cpu",
            work=str(tmp_path / "work"),
            cluster=str(machines.address),
        )
        parts = [DEVICES, replace(part_of("two-machines"), after="")]
        found = list(SelfTest(setting, parts=parts).run())
    assert [verdict.outcome for verdict in found] == ["passed", "passed"], found
    assert "1 ranks and 1 engines on 2 machines" in found[1].result
