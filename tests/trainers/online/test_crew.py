"""All workers start at the same time, and mistakes in a reward file are told first."""

from __future__ import annotations

from typing import Any, cast

import pytest

from isotrain.errors import RewardError
from isotrain.trainers.online.crew import Crew


class Group:
    """A worker group that writes down what is asked of it."""

    def __init__(self, name: str, seen: list[str], error: Exception | None = None) -> None:
        self.name, self.seen, self.error = name, seen, error

    def submit(self, method: str, *args: Any) -> str:
        self.seen.append(f"{self.name} {method}")
        return method

    def call_on(self, index: int, method: str, *args: Any) -> str:
        return "store"

    def results(self, calls: str, timeout: float) -> list[Any]:
        self.seen.append(f"{self.name} awaited")
        if self.error:
            raise self.error
        return [{"of": self.name}]


def test_the_rewards_are_awaited_first_while_all_start() -> None:
    seen: list[str] = []
    groups: dict[str, Any] = {name: Group(name, seen) for name in ("ranks", "engines", "rewards")}
    crew = Crew(store=("127.0.0.1", None), relays=cast(Any, None), **groups)
    assert crew.start(60.0) == ({"of": "ranks"}, {"of": "engines"})
    assert sorted(seen[:3]) == ["engines start", "ranks start", "rewards start"]
    assert seen[3:] == ["rewards awaited", "ranks awaited", "engines awaited"]


def test_a_mistake_in_a_reward_file_waits_for_no_model() -> None:
    seen: list[str] = []
    groups: dict[str, Any] = {name: Group(name, seen) for name in ("ranks", "engines")}
    rewards: Any = Group("rewards", seen, RewardError("reward.py:2: NameError"))
    with pytest.raises(RewardError, match="NameError"):
        Crew(store=("127.0.0.1", None), relays=cast(Any, None), rewards=rewards, **groups).start(60.0)
    assert "ranks awaited" not in seen and "engines awaited" not in seen
