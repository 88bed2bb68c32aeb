"""What the controller does for an update: whom it tells what, which transport it takes, and who is late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isotrain.algorithms.kl import FixedKl
from isotrain.cluster.failures import Overdue, WorkerDied
from isotrain.cluster.replaceable import Died, WorkerTask
from isotrain.cluster.workers import WorkerCall
from isotrain.errors import WeightUpdateError
from isotrain.observe.spans import SpanLog
from isotrain.trainers.online.engines import Weights
from isotrain.trainers.online.loop import OnlineProgress, OnlineTrainer
from isotrain.trainers.online.rollouts import SyncBatches
from isotrain.trainers.online.weight_sync import WeightSync
from isotrain.weights.devices import BroadcastTransport
from isotrain.weights.digest import HOST
from isotrain.weights.send import SendOrder, Sent
from isotrain.weights.stream import wait_for_end
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

    def send(self, weights: Weights, buffered: Any = None, taken: Any = ()) -> None:
        assert weights.updates == [written("x", 0)] and buffered is None


@pytest.mark.parametrize("method", ["send_weights", "wake", None])
def test_every_part_of_an_update_has_a_limit(method: str | None) -> None:
    late: Any = Late(method or "nothing")
    trainer: Any = object.__new__(OnlineTrainer)
    trainer.rollout, trainer.job = SimpleNamespace(generates=True), SimpleNamespace(spans=SpanLog(""))
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
    weights.tell = said.append
    weights.choose()
    assert weights.together is not bool(fails)
    assert group.closed == len(said) == bool(fails)
    assert all("weights go through host memory" in line and f"({fails}" in line for line in said)
    if fails != "listening":
        (told,) = group.told
        assert [str(told.source(worker)) for worker in range(2)] == ["127.0.0.1:5", "127.0.0.1:6"]


BROADCAST = Routes("broadcast", ((0,), (0,)), (2, 0), ("10.0.0.1",) * 2)
DEATH = WorkerDied("rollout engine 1 died")


class Buffering:
    """Two ranks and two engines with second buffers; engine 1 may die while weights are sent."""

    timeout, check_prompts, deaths = 5.0, [np.zeros(4, np.int32)], (0, 0)

    def __init__(self) -> None:
        self.sender = BroadcastTransport().open("127.0.0.1", 2, 5.0, HOST)
        self.error, self.dies, self.late = "", False, False
        self.replaced: list[int] = []
        self.told: list[tuple[Weights, Any]] = []
        self.group = self
        self.watch = SimpleNamespace(wait=lambda refs, deadline, fetch_local: refs[: not self.late])

    def __len__(self) -> int:
        return 2

    def within(self, timeout: float) -> Buffering:
        return self

    def call_each(self, method: Callable[..., Any], args: Sequence[SendOrder]) -> list[Sent]:
        transports, logps = {order.transport for order in args}, np.zeros(3, np.float32)
        if method.__name__ == "announce_weights":
            assert transports == {"broadcast"} and all(order.check_prompts for order in args)
            return [Sent(self.sender.announce(args[0].version, 8, 5.0), logps), Sent()]
        if transports == {"file"}:
            return [Sent(written("x", 0), logps), Sent()]
        assert all(order.buffered and order.check_prompts is None for order in args)
        if self.late:
            wait_for_end(self.sender.sources[0], args[0].version, 5.0)  # the sender hears that it is over
        if self.dies or self.error:
            return [Sent(error=self.error or "connection closed"), Sent()]
        whole = WeightUpdate(args[0].version, self.sender.sources, 7, 8, "digest")
        return [Sent(whole), Sent()]

    def submit_beside(self, index: int, method: Callable[..., Any], *args: Any) -> WorkerTask[Any]:
        assert method.__name__ == "receive"
        return WorkerTask(index, 0, WorkerCall(index, "receive", object()))  # type: ignore[arg-type]

    def results(self, calls: Sequence[WorkerCall[Any]], timeout: float | None = None) -> list[None]:
        if self.dies and calls[0].index == 1:
            raise DEATH
        if self.error:
            raise WeightUpdateError(f"weight update was not sent: {self.error}")
        return [None]

    def replace(self, task: WorkerTask[Any], death: WorkerDied) -> None:
        assert death is DEATH
        self.replaced.append(task.index)

    def settle(self) -> float:
        return 0.0

    def send(self, weights: Weights, buffered: Any = None, taken: Sequence[Any] = ()) -> None:
        assert (buffered is None) == (not taken)
        self.told.append((weights, buffered))


def test_engines_with_second_buffers_are_told_when_all_have_it() -> None:
    group, said = Buffering(), list[str]()
    weights = sync(BROADCAST, FILES, ranks=group, engines=group)
    weights.routes, weights.ahead, weights.tell = BROADCAST, True, said.append
    weights.send(1, wait=False)
    ((newest, buffered),) = group.told
    # Nothing to find again: a successor has the ranks write it.
    assert newest.version == 1 and newest.updates is None
    assert [(update.version, update.digest, update.bytes) for update in buffered] == [(1, "digest", 8)] * 2
    assert not said and weights.route == "broadcast to a second buffer"


def test_an_engine_that_dies_meanwhile_is_replaced_and_all_read_files() -> None:
    group, said = Buffering(), list[str]()
    weights = sync(BROADCAST, FILES, ranks=group, engines=group)
    weights.routes, weights.ahead, weights.tell = BROADCAST, True, said.append
    group.dies = True
    weights.send(1, wait=False)
    assert group.replaced == [1] and not said
    ((newest, buffered),) = group.told
    assert buffered is None and newest.updates == [written("x", 0)]
    # Whoever still waits for the dead one has been told.
    with pytest.raises(WeightUpdateError, match="weight update 1 was not sent: rollout engine 1 died"):
        wait_for_end(group.sender.sources[0], 1, 5.0)
    group.dies = False
    weights.send(2, wait=False)
    assert group.told[1][1] is not None, "the next update goes by device again"


def test_an_engine_that_is_late_is_not_waited_for() -> None:
    group, said = Buffering(), list[str]()
    weights = sync(BROADCAST, FILES, ranks=group, engines=group)
    weights.routes, weights.ahead, weights.tell = BROADCAST, True, said.append
    group.late = True
    with pytest.raises(WeightUpdateError, match="weight update 1 was not sent: no end within 15 s"):
        weights.send(1, wait=False)
    assert not group.told


def test_two_failures_in_a_row_are_enough() -> None:
    group, said = Buffering(), list[str]()
    weights = sync(BROADCAST, FILES, ranks=group, engines=group)
    weights.routes, weights.ahead, weights.tell = BROADCAST, True, said.append
    for version, error in enumerate(("link down", "", "link down", "link down", ""), start=1):
        group.error = error
        weights.send(version, wait=False)
    assert [buffered is not None for _, buffered in group.told] == [False, True, False, False, False]
    assert ["and all later ones go through" in line for line in said] == [False, False, True]
    assert all("link down" in line and "host memory" in line for line in said)
    assert weights.route == "file"


def test_what_engines_are_told_survives_json() -> None:
    import json
    from dataclasses import asdict

    for update in (written("x", 0), WeightUpdate(4, (StoreSource("ipc", "::1", 5),) * 2, 0, 9, "")):
        assert WeightUpdate.from_json(json.loads(json.dumps(asdict(update)))) == update
