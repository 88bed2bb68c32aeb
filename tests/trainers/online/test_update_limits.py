"""A weight update that somebody is late for ends, and says who."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from isotrain.cluster.failures import Overdue
from isotrain.errors import WeightUpdateError
from isotrain.trainers.online.loop import OnlineTrainer
from isotrain.trainers.online.rollouts import SyncBatches


class Late:
    """Ranks and engines of which one does not answer; calls without a limit would wait for ever."""

    timeout, check_prompts = 7.0, None

    def __init__(self, method: str) -> None:
        self.method = method

    def within(self, timeout: float) -> SimpleNamespace:
        assert timeout == 7.0
        return SimpleNamespace(call=self._call)

    def on_all(self, method: Callable[..., Any], timeout: float | None = None) -> None:
        assert timeout == 7.0
        self._call(method)

    def _call(self, method: Callable[..., Any], *_: Any) -> list[Any]:
        if method.__name__ == self.method:
            raise Overdue(f"no reply to `{self.method}` within 7 s from 1 on 10.0.0.2 (pid 5)")
        return [SimpleNamespace(update=None, logps=None)]

    def settle(self) -> float:
        return 0.0

    def send(self, weights: Any) -> None: ...

    def spread(self, updates: Any, timeout: float) -> list[Any]:
        return []


@pytest.mark.parametrize("method", ["publish", "wake", None])
def test_every_part_of_an_update_has_a_limit(method: str | None) -> None:
    late: Any = Late(method or "nothing")
    trainer: Any = object.__new__(OnlineTrainer)
    trainer.settings = SimpleNamespace(generates=True, colocated=True)
    trainer.ranks = trainer.engines = trainer.relays = late
    trainer.batches, trainer.timing = SyncBatches(lambda: None), {}  # type: ignore[arg-type, return-value]
    if method is None:
        assert trainer.send_weights(3)["rollout/version"] == 3.0
        return
    with pytest.raises(WeightUpdateError, match=rf"weight update 3: no reply to `{method}` .*10\.0\.0\.2"):
        trainer.send_weights(3)
