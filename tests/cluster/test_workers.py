"""Placement and worker groups on a real private cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from plain_workers import Clerk, Rank, Tidy

from isotrain.cluster import waiting
from isotrain.cluster.connect import Cluster, join_cluster
from isotrain.cluster.failures import WorkerDied
from isotrain.cluster.placement import Demand, engine_environments, place, rank_environments
from isotrain.cluster.workers import Member, WorkerCall, WorkerGroup, next_item, wait_any
from isotrain.device.cpu import Cpu
from isotrain.device.detect import choose_device
from isotrain.device.npu import NPU
from isotrain.errors import ClusterError, DataError, NonFiniteError, WorkerLost
from isotrain.recipe.online import ClusterSection

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with join_cluster(ClusterSection(address="local"), choose_device("npu"), cpus=2) as joined:
        yield joined


@pytest.fixture(scope="module")
def clerks(cluster: Cluster) -> Iterator[WorkerGroup[Clerk]]:
    members = [Member((f"clerk{n}",), {"SHELF": str(n)}) for n in range(2)]
    with WorkerGroup("clerk", Clerk, members, start_timeout=60) as group:
        yield group


def fly(clerk: Clerk) -> None:
    """No method of theirs."""


def wait_for_end(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} still runs after {seconds} s"
        time.sleep(0.05)


def test_calls_reach_all_each_and_one(clerks: WorkerGroup[Clerk]) -> None:
    assert len(clerks) == 2
    assert clerks.within(30).call(Clerk.say, "hello") == ["clerk0: hello", "clerk1: hello"]
    assert clerks.call(Clerk.variable, "SHELF") == ["0", "1"]
    assert clerks.call_each(Clerk.add, [1, 10]) == [1, 10]
    assert clerks.call(Clerk.add, 1, factor=2) == [3, 12]
    assert clerks.call_on(1, Clerk.add, -12) == 0
    assert clerks.call_on(0, Clerk.add, -3) == 0
    assert [where.pid for where in clerks.locations] == clerks.call(Clerk.pid)


def test_calls_need_not_wait(clerks: WorkerGroup[Clerk]) -> None:
    calls = clerks.submit(Clerk.sleep, 3.0)
    slow = clerks.submit_to(0, Clerk.add, 5)
    assert ray.wait([call.ref for call in calls], timeout=0)[0] == []
    assert [call.index for call in calls] == [0, 1]
    assert clerks.results([slow], timeout=30) == [5]
    assert clerks.results(calls, timeout=30) == [3.0, 3.0]
    clerks.call_on(0, Clerk.add, -5)


def test_our_errors_keep_their_type_and_words(clerks: WorkerGroup[Clerk]) -> None:
    with pytest.raises(NonFiniteError) as caught:
        clerks.call(Clerk.fail, "ours")
    assert type(caught.value) is NonFiniteError
    assert str(caught.value) == "loss is nan at step 3"
    assert caught.value.__cause__ is None
    assert clerks.call(Clerk.add, 0) == [0, 0]


def test_other_errors_come_with_the_workers_traceback(clerks: WorkerGroup[Clerk]) -> None:
    with pytest.raises(ClusterError) as caught:
        clerks.call_on(1, Clerk.fail, "other")
    text = str(caught.value)
    assert text.startswith("clerk 1 on 127.0.0.1 (pid ")
    assert "failed in `fail`" in text and 'raise KeyError("missing thing")' in text
    assert "ray" not in text and "host.py" not in text
    assert not caught.value.may_pass  # the same call would raise it again
    with pytest.raises(WorkerLost, match="Unpicklable: a"):
        clerks.call_on(1, Clerk.fail, "unpicklable")
    with pytest.raises(ClusterError, match="SystemExit: 5"):
        clerks.call_on(1, Clerk.fail, "exit")
    with pytest.raises(ClusterError, match="no attribute 'fly'"):
        clerks.call_on(1, fly)
    assert clerks.call(Clerk.add, 0) == [0, 0]


def test_an_error_at_the_start(cluster: Cluster) -> None:
    with pytest.raises(DataError, match=r"^no such name: bad$"):
        WorkerGroup("clerk", Clerk, [Member(("bad",))], start_timeout=60)


def test_a_call_over_its_time_names_who_is_late(clerks: WorkerGroup[Clerk]) -> None:
    with pytest.raises(ClusterError, match=r"clerk: no reply to `sleep` within 0.5 s from 1 on 127\.0\.0\.1"):
        clerks.within(0.5).call_each(Clerk.sleep, [0.0, 1.5])
    assert clerks.within(30).call(Clerk.add, 0) == [0, 0]


def test_streams_give_values_as_they_come(clerks: WorkerGroup[Clerk]) -> None:
    stream = clerks.stream(0, Clerk.numbers, 4)
    assert [next_item(clerks, stream) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(StopIteration):
        next_item(clerks, stream)
    stream = clerks.stream(1, Clerk.numbers, 5, fail_at=2)
    assert [next_item(clerks, stream) for _ in range(2)] == [0, 1]
    with pytest.raises(DataError, match=r"^number 2 is broken$"):
        next_item(clerks, stream)


def test_an_independent_member_can_die_and_be_restarted(clerks: WorkerGroup[Clerk]) -> None:
    clerks.call_on(0, Clerk.add, 7)
    clerks.call_on(1, Clerk.say, "these are my last words")
    first, second = clerks.call(Clerk.pid)
    calls = clerks.submit(Clerk.sleep, 3.0)
    os.kill(second, signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        clerks.results(calls[1:], timeout=60)
    assert caught.value.index == 1
    text = str(caught.value)
    assert text.startswith(f"clerk 1 on 127.0.0.1 (pid {second}) died during `sleep`: ")
    assert "killed" in text and "  these are my last words" in text
    clerks.restart(1)
    assert clerks.results(calls[:1]) == [3.0]
    assert clerks.call(Clerk.add, 0) == [7, 0]
    assert clerks.call(Clerk.pid)[0] == first
    assert clerks.call(Clerk.variable, "SHELF") == ["0", "1"]
    clerks.call_on(0, Clerk.add, -7)


def test_close_ends_workers_in_the_middle_of_a_call(cluster: Cluster) -> None:
    group = WorkerGroup("clerk", Clerk, [Member()], start_timeout=60)
    (pid,) = group.call(Clerk.pid)
    call = group.submit_to(0, Clerk.sleep, 600)
    group.close()
    wait_for_end(pid, 10)
    with pytest.raises(ClusterError, match="cannot be called: it is closed"):
        group.call(Clerk.pid)
    with pytest.raises(ClusterError):
        group.results([WorkerCall(0, "sleep", call.ref)], timeout=10)


def test_the_end_of_the_block_lets_workers_close_but_not_for_long(cluster: Cluster, tmp_path: Path) -> None:
    quick, slow, dead = (tmp_path / name for name in ("quick", "slow", "dead"))
    members = [Member((str(quick), 0.0)), Member((str(slow), 600.0)), Member((str(dead), 0.0))]
    with WorkerGroup("clerk", Tidy, members, start_timeout=60, closing=1.0) as group:
        pids = group.call(Tidy.pid)
        os.kill(pids[2], signal.SIGKILL)
    assert group.closed  # the slow one would have taken ten minutes
    assert not quick.exists() and slow.exists() and dead.exists()
    for pid in pids:
        wait_for_end(pid, 10)


def test_one_error_ends_an_spmd_group(cluster: Cluster) -> None:
    group = WorkerGroup("training rank", Clerk, [Member(), Member()], spmd=True, start_timeout=60)
    pids, seen = group.call(Clerk.pid), []
    group.before_end = lambda cause: seen.append((str(cause), [Path(f"/proc/{p}").exists() for p in pids]))
    with pytest.raises(DataError, match=r"^row 7 is broken$"):
        group.within(60).call_each(Clerk.fail_or_wait, [False, True])
    assert seen == [("row 7 is broken", [True, True])], "what they write may be finished first"
    for pid in pids:
        wait_for_end(pid, 10)
    with pytest.raises(ClusterError, match=r"training rank 0 cannot be called.*row 7 is broken"):
        group.call(Clerk.pid)


def test_a_killed_rank_ends_the_one_that_waits_for_it(cluster: Cluster) -> None:
    with place(cluster, Cpu(), Demand(ranks=2), start_timeout=30) as placement:
        environments = rank_environments(placement.ranks, Cpu())
        members = [
            Member(environment=own, slot=slot)
            for own, slot in zip(environments, placement.ranks, strict=True)
        ]
        group = WorkerGroup("training rank", Rank, members, spmd=True, start_timeout=90)
        assert placement.store_host is None
        joined = group.within(90).call(Rank.join, group.call_on(0, Rank.open_store, None))
        assert [(one["rank"], one["local_rank"], one["interface"]) for one in joined] == [
            (0, 0, "lo"),
            (1, 1, "lo"),
        ]
        assert group.within(30).call_each(Rank.sum, [1.0, 2.0]) == [3.0, 3.0]
        calls = group.submit_each(Rank.sum_alone, [True, False])
        time.sleep(0.5)
        os.kill(joined[1]["pid"], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"training rank 1 on 127\.0\.0\.1 \(pid \d+\) died") as caught:
            group.results(calls, timeout=100)
        assert caught.value.index == 1
        wait_for_end(joined[0]["pid"], 30)


def test_a_rank_that_ends_unasked_is_noticed_by_those_who_wait_for_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "LOOK_EVERY", 0.5)
    watching = waiting.Watch()
    ranks = WorkerGroup("training rank", Clerk, [Member(), Member()], spmd=True, watch=watching)
    with ranks, WorkerGroup("clerk", Clerk, [Member()], watch=watching) as others:
        assert others.call(Clerk.sleep, 1.2) == [1.2]  # nothing has happened
        victim = ranks.call(Clerk.pid)[1]
        items, stream = 0, others.stream(0, Clerk.slowly, 1000, 0.2)
        os.kill(victim, signal.SIGKILL)
        # It goes on getting items, and must look all the same.
        with pytest.raises(
            ClusterError, match=rf"training rank 1 on 127\.0\.0\.1 \(pid {victim}\) died: "
        ) as told:
            while True:
                wait_any(watching, [stream])
                next_item(others, stream)
                items += 1
        assert items < 1000
        assert not isinstance(told.value, WorkerDied)  # a caller would restart the wrong worker
        with pytest.raises(ClusterError, match="training rank 1"):
            others.call(Clerk.sleep, 60)


@pytest.mark.parametrize(
    ("demand", "message"),
    [
        (
            Demand(ranks=3),
            r"the recipe needs 3 CPU \(device\.ranks=3, .*has 2 \(\d free\) on 1 node; lower device\.ranks",
        ),
        (
            Demand(ranks=2, engines=2, tensor_parallel=2, colocated=False),
            r"needs 6 CPU \(device\.ranks=2 \+ rollout\.engines=2 x rollout\.tensor_parallel=2, .*"
            r"cluster\.placement=colocated",
        ),
    ],
)
def test_too_few_devices_are_told_at_once(cluster: Cluster, demand: Demand, message: str) -> None:
    with pytest.raises(ClusterError, match=message), place(cluster, Cpu(), demand, start_timeout=600):
        pass


@pytest.mark.timeout(120)
def test_places_ranks_and_engines_separately(cluster: Cluster) -> None:
    demand = Demand(ranks=1, engines=1, colocated=False)
    with place(cluster, Cpu(), demand, start_timeout=60) as placement:
        rank, engine = placement.ranks[0], placement.engines[0]
        assert rank.bundle != engine.bundle and rank.host == engine.host == "127.0.0.1"
        members = [Member((), {}, rank), Member((), {}, engine)]
        with WorkerGroup("clerk", Clerk, members, start_timeout=60) as group:
            assert group.call(Clerk.add, 1) == [1, 1]
    with place(cluster, Cpu(), demand, start_timeout=60):  # it needs what the first gave back
        pass


def test_ranks_and_an_engine_take_turns_on_simulated_devices(cluster: Cluster) -> None:
    """Ray knows this device by name only: that is all the controller needs."""
    demand = Demand(ranks=2, engines=1, tensor_parallel=2)
    with place(cluster, NPU, demand, start_timeout=60) as placement:
        assert [one.devices for one in placement.ranks] == [("0",), ("1",)]
        assert [one.devices for one in placement.engines] == [("0", "1")]
        members = [
            Member(("npu",), own, one)
            for own, one in zip(rank_environments(placement.ranks, NPU), placement.ranks, strict=True)
        ]
        engine = Member((), engine_environments(placement.engines, NPU)[0], placement.engines[0])
        with (
            WorkerGroup("training rank", Rank, members, spmd=True, start_timeout=90) as ranks,
            WorkerGroup("rollout engine", Clerk, [engine], start_timeout=90) as engines,
        ):
            # As on several machines: the device's own collectives keep to the interface of the store.
            joined = ranks.within(90).call(Rank.join, ranks.call_on(0, Rank.open_store, "127.0.0.1"))
            assert [one["device"] for one in joined] == ["npu:0", "npu:1"]
            assert [one["own interface"] for one in joined] == ["lo", "lo"]
            assert ranks.within(60).call_each(Rank.sum, [1.0, 2.0]) == [3.0, 3.0]
            assert engines.call(Clerk.variable, "ASCEND_RT_VISIBLE_DEVICES") == ["0,1"]
