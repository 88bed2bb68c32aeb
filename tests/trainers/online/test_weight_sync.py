"""What the controller does for an update: whom it tells what, which transport it takes, and who is late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isotrain.algorithms.kl import FixedKl
from isotrain.cluster.failures import Overdue
from isotrain.cluster.replaceable import Died, WorkerTask
from isotrain.errors import WeightUpdateError
from isotrain.trainers.online.loop import OnlineProgress, OnlineTrainer
from isotrain.trainers.online.rollouts import SyncBatches
from isotrain.trainers.online.weight_sync import Weights, WeightSync
from isotrain.weights.send import SendOrder, Sent
from isotrain.weights.update import REHEARSAL, FileSource, Routes, StoreSource, WeightUpdate

FILES = Routes("file", ((0,),), (1,), ("",))
IPC = Routes("ipc", ((0, 1),), (1, 1), ("127.0.0.1",) * 2)


class Late:
    """Ranks and engines of which one does not answer; calls without a limit would wait for ever."""

    timeout, check_prompts = 7.0, None

    def __init__(self, method: str) -> None:
        self.method = method

    def within(self, timeout: float) -> SimpleNamespace:
        assert timeout == 7.0
        return SimpleNamespace(call_each=self._call)

    def on_all(self, method: Callable[..., Any], timeout: float | None = None) -> None:
        assert timeout == 7.0
        self._call(method)

    def _call(self, method: Callable[..., Any], *_: Any) -> list[Sent]:
        if method.__name__ == self.method:
            raise Overdue(f"no reply to `{self.method}` within 7 s from 1 on 10.0.0.2 (pid 5)")
        return [Sent(written("x", 0), np.zeros(1, np.float32))]

    def settle(self) -> float:
        return 0.0

    def send(self, weights: Weights) -> None:
        assert weights.updates == [written("x", 0)]


@pytest.mark.parametrize("method", ["send_weights", "wake", None])
def test_every_part_of_an_update_has_a_limit(method: str | None) -> None:
    late: Any = Late(method or "nothing")
    trainer: Any = object.__new__(OnlineTrainer)
    trainer.rollout = SimpleNamespace(generates=True)
    trainer.weights = WeightSync(late, late, late, [FILES], colocated=True)
    trainer.batches = SyncBatches(lambda: None)  # type: ignore[arg-type, return-value]
    trainer.progress = OnlineProgress(FixedKl(0.0))
    if method is None:
        assert trainer.send_weights(3)["rollout/version"] == 3.0
        return
    with pytest.raises(WeightUpdateError, match=rf"weight update 3: no reply to `{method}` .*10\.0\.0\.2"):
        trainer.send_weights(3)


def written(digest: str, rank: int) -> WeightUpdate:
    return WeightUpdate(3, (FileSource(f"/file {rank}"),), 1, 8, digest)


def sync(*possible: Routes, ranks: Any = None, engines: Any = None) -> WeightSync:
    nobody: Any = []
    return WeightSync(ranks, engines or SimpleNamespace(timeout=5.0), nobody, possible, colocated=False)


def test_each_engine_reads_the_file_of_its_own_machine() -> None:
    routes = Routes("file", ((2,), (0,)), (1, 0, 1), ("",) * 3)
    updates = sync(routes)._updates(routes, [written("x", 0), None, written("x", 2)])
    assert [str(update.source()) for update in updates] == ["/file 2", "/file 0"]


def test_copies_that_differ_are_found() -> None:
    routes = Routes("file", ((1,), (0,)), (1, 1), ("",) * 2)
    with pytest.raises(WeightUpdateError, match="ranks 0, 1 gathered 2 different copies of the weights"):
        sync(routes)._updates(routes, [written("x", 0), written("y", 1)])


class Rehearsing:
    """Two ranks and an engine of two workers that try a transport; `fails` names the part that does."""

    timeout = 5.0

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.closed = 0
        self.told: list[WeightUpdate] = []

    def within(self, timeout: float) -> Rehearsing:
        return self

    def call(self, method: Callable[..., Any]) -> list[None]:
        assert method.__name__ == "close_senders"
        self.closed += 1
        return [None, None]

    def call_each(self, method: Callable[..., Any], args: Sequence[SendOrder]) -> list[Sent]:
        assert [(order.version, order.transport) for order in args] == [(REHEARSAL, "ipc")] * 2
        if method.__name__ == "send_weights":
            return [Sent(), Sent(error=self._error("rank 1"))]
        sources = [(StoreSource("ipc", "127.0.0.1", port),) for port in (5, 6)]
        replies = [Sent(WeightUpdate(REHEARSAL, source, 0, 0, "")) for source in sources]
        return [replies[0], Sent(error=self.fails) if self.fails == "listening" else replies[1]]

    def submit(self, index: int, method: Callable[..., Any], *args: Any) -> WorkerTask[Any]:
        self.told.append(args[0])
        return WorkerTask(index, 0, None)  # type: ignore[arg-type]

    def result(self, task: WorkerTask[Any], timeout: float | None = None) -> str | Died:
        return Died() if self.fails == "an engine died" else self._error("engine")

    def _error(self, part: str) -> str:
        return f"{part} refuses" if self.fails == part else ""


@pytest.mark.parametrize("fails", ["", "listening", "rank 1", "engine", "an engine died"])
def test_files_are_taken_where_a_rehearsal_fails(fails: str) -> None:
    group, said = Rehearsing(fails), list[str]()
    weights = sync(IPC, FILES, ranks=group, engines=group)
    weights.choose(said.append)
    assert weights.together is not bool(fails)
    assert group.closed == len(said) == bool(fails)
    assert all("weights go through host memory" in line and f"({fails}" in line for line in said)
    if fails != "listening":
        (told,) = group.told
        assert [str(told.source(worker)) for worker in range(2)] == ["127.0.0.1:5", "127.0.0.1:6"]


def test_what_engines_are_told_survives_json() -> None:
    import json
    from dataclasses import asdict

    for update in (written("x", 0), WeightUpdate(4, (StoreSource("ipc", "::1", 5),) * 2, 0, 9, "")):
        assert WeightUpdate.from_json(json.loads(json.dumps(asdict(update)))) == update
