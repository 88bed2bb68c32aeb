"""In which order the workers of a run load their models, and whose mistakes are told first."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from isotrain.device.cpu import Cpu
from isotrain.errors import RewardError
from isotrain.trainers.online.worker_groups import WorkerGroups

SETTINGS = {"engine": "hf", "cores": "0-3"}


class Group:
    """A worker group that writes down what is asked of it, in one list for all groups."""

    def __init__(self, name: str, seen: list[str], error: Exception | None = None) -> None:
        self.name, self.seen, self.error = name, seen, error
        self.locations = [SimpleNamespace(node="a")]

    def within(self, timeout: float) -> Group:
        return self

    def submit(self, method: Callable[..., Any], *_: Any) -> list[Any]:
        self.seen.append(f"{self.name} {method.__name__}")
        return [SETTINGS if self.name == "engines" else self.name]

    def results(self, calls: list[Any], timeout: float | None = None) -> list[Any]:
        self.seen.append(f"{self.name} awaited")
        if self.error:
            raise self.error
        return calls

    def call(self, method: Callable[..., Any], *_: Any) -> list[Any]:
        return self.submit(method)

    def call_on(self, index: int, method: Callable[..., Any], *_: Any) -> str:
        return "store"


def groups(seen: list[str], colocated: bool, reward_error: Exception | None = None) -> WorkerGroups:
    groups: dict[str, Any] = {name: Group(name, seen) for name in ("ranks", "engines")}
    rewards: Any = Group("rewards", seen, reward_error)
    return WorkerGroups(
        device=Cpu(),
        store=("127.0.0.1", None),
        relays=cast(Any, None),
        rewards=rewards,
        queue=cast(Any, None),
        routes=[],
        colocated=colocated,
        **groups,
    )


def test_the_rewards_are_awaited_first_while_all_start() -> None:
    seen: list[str] = []
    assert groups(seen, colocated=False).start(60.0) == (["ranks"], SETTINGS)
    assert sorted(seen[:3]) == ["engines start", "ranks start", "rewards start"]
    assert seen[3:] == ["rewards awaited", "ranks awaited", "engines awaited"]


def test_engines_that_take_turns_start_while_the_ranks_are_away() -> None:
    seen: list[str] = []
    assert groups(seen, colocated=True).start(60.0) == (["ranks"], SETTINGS)
    own = [call for call in seen if not call.startswith("rewards")]
    assert own == [
        "ranks start",
        "ranks awaited",
        "ranks offload",
        "engines start",
        "engines sleep",
        "ranks onload",
    ]


def test_a_mistake_in_a_reward_file_waits_for_no_model() -> None:
    seen: list[str] = []
    with pytest.raises(RewardError, match="NameError"):
        groups(seen, colocated=False, reward_error=RewardError("reward.py:2: NameError")).start(60.0)
    assert "ranks awaited" not in seen and "engines awaited" not in seen
