"""A run directory that not every machine has is refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotrain.errors import ClusterError
from isotrain.trainers.online.policy_rank import PolicyRank
from isotrain.trainers.online.run import _check_shared


class Ranks:
    """Two machines, of which the second sees `place` where the first sees the run directory."""

    locations = (SimpleNamespace(host="10.0.0.1"), SimpleNamespace(host="10.0.0.2"))

    def __init__(self, place: Path) -> None:
        self.prompt_index = place

    def call(self, method: Callable[..., bool], file: str) -> list[bool]:
        assert method == PolicyRank.finds
        return [Path(file).is_file(), (self.prompt_index / Path(file).name).is_file()]


def test_all_ranks_must_see_the_run_directory(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    same: Any = Ranks(here)
    _check_shared(same, here)
    other: Any = Ranks(elsewhere)
    with pytest.raises(ClusterError, match=r"output: .*run is not shared with 10\.0\.0\.2; put it"):
        _check_shared(other, here)
    assert list(here.iterdir()) == []
