from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from isotrain.recipe.schema import DeviceSection, MeshSection
from support import tiny_recipe


@pytest.mark.parametrize("mesh", [{"context": 3}, {"replicas": 4}, {"context": 2, "replicas": 2}])
def test_ranks_that_do_not_form_the_mesh(mesh: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"device\.ranks \(2\) cannot be divided .* change one"):
        DeviceSection(ranks=2, mesh=MeshSection(**mesh))


@pytest.mark.parametrize(
    ("mesh", "message"), [({"expert": 3}, "by device.mesh.expert"), ({"expert": 2, "replicas": 2}, "set one")]
)
def test_experts_that_do_not_fit(mesh: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DeviceSection(ranks=4, mesh=MeshSection(**mesh))


def test_one_rank_may_be_one_of_torchruns() -> None:
    assert DeviceSection(mesh=MeshSection(context=2)).mesh.problem(1)
    assert DeviceSection(mesh=MeshSection(context=2, replicas=2)).mesh.problem(8) is None


@pytest.mark.parametrize("mesh", [{"context": 2}, {"replicas": 2}])
@pytest.mark.parametrize("traced", [{"layer_trace": 1}, {"operators": True}])
def test_traces_need_whole_micro_batches(
    tmp_path: Path, traced: dict[str, Any], mesh: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match=r"whole micro-batches .* remove it, or set"):
        tiny_recipe(tmp_path, tmp_path, "cpu", device={"ranks": 2, "mesh": mesh}, observe=traced)
