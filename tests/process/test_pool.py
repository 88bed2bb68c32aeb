"""Calls that hang, crash or fail cost one answer each, and no process outlives its owner."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from children import FUNCTIONS, alive, group_of, wait_for, write_functions
from isotrain.errors import RewardError
from isotrain.process.pool import Pool
from isotrain.rewards.base import RewardInput, Scored
from isotrain.rewards.function import REWARD_CALLS, read_source

pytestmark = pytest.mark.heavy

RewardPool = Pool[RewardInput, Scored]
MakePool = Callable[..., RewardPool]
ENDLESS = 1000.0


def running(pool: RewardPool) -> list[int]:
    """Its processes."""
    return [worker.child.pid for worker in list(pool._workers)]


def setup_of(path: str) -> dict[str, Any]:
    return {"kind": "function", "path": path, "source": read_source(path)}


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    pools: list[RewardPool] = []
    path = write_functions(tmp_path)

    def make(function: str = "score", timeout: float = ENDLESS, **options: int) -> RewardPool:
        pools.append(
            Pool(
                REWARD_CALLS,
                setup_of(f"{path}:{function}"),
                name="reward.function",
                timeout=timeout,
                **options,
            )
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def run(pool: RewardPool, responses: list[str]) -> list[Scored]:
    return [future.result(60) for future in pool.submit([RewardInput(text, "", {}) for text in responses])]


@pytest.mark.parametrize(
    ("response", "failure", "detail"),
    [
        ("sleep", "timeout", "no result after 1 s"),
        ("busy", "timeout", "no result after 1 s"),
        ("exit", "crash", "exit code 3"),
        ("segfault", "crash", "SIGSEGV"),
        ("kill", "crash", "SIGKILL"),
        ("close", "crash", "the reward process"),
        ("noise", "crash", "an invalid reply"),
        ("huge", "crash", "an invalid reply"),
        ("deep", "crash", "an invalid reply"),
        ("endless", "crash", "an endless reply"),
    ],
)
def test_a_hang_or_crash_costs_one_answer(
    make_pool: MakePool, response: str, failure: str, detail: str
) -> None:
    results = run(make_pool(timeout=1.0), ["", response, ""])
    assert [result.failure for result in results] == [None, failure, None]
    assert [result.score for result in results] == [1.0, 0.0, 1.0]
    assert detail in results[1].detail


def test_what_does_not_end_the_child_leaves_it_running(make_pool: MakePool) -> None:
    pool = make_pool()
    kinds = ["raise \x1b[31mred", "sys.exit", "nan", "inf", "text", "none", "list", "big", "no-score"]
    results = run(pool, ["pid", *kinds, "true", "print", "dict", "pid"])
    first, *failed, true, printed, parts, last = results
    failures = ["crash" if kind == "sys.exit" else "error" for kind in kinds]
    assert [result.failure for result in failed] == failures
    assert first.score == last.score > 1
    assert (true.score, printed.score) == (1.0, 1.0)
    assert (parts.score, parts.parts) == (0.5, {"length": 3.0})
    details = dict(zip(kinds, [result.detail for result in failed], strict=True))
    line = 1 + next(i for i, text in enumerate(FUNCTIONS.splitlines()) if "no such thing" in text)
    assert details["raise \x1b[31mred"] == f"rewards.py:{line}: ValueError: no such thing [31mred"
    assert all(detail.isprintable() and len(detail) <= 300 for detail in details.values())
    assert details["nan"] == "the function returned nan"
    assert details["text"] == "the function returned a str, not a number"
    assert details["no-score"] == "the function returned a dict without 'score'"


def test_an_async_hang_is_ended_by_its_loop(make_pool: MakePool) -> None:
    pool = make_pool("score_async", timeout=1.0, concurrency=8)
    before = run(pool, ["pid"])
    results = run(pool, ["await 1000", "stubborn", "await 0.1", "sys.exit", "raise", "pid"])
    assert [result.failure for result in results] == ["timeout", "timeout", None, "crash", "error", None]
    assert results[-1].score == before[0].score


def test_threads_that_hang_cost_their_calls_alone(make_pool: MakePool) -> None:
    pool = make_pool("score_async", timeout=1.0, concurrency=16)
    results = run(pool, ["thread 1000"] * 12 + ["thread 0.01"] * 4)
    assert [result.failure for result in results] == ["timeout"] * 12 + [None] * 4
    assert [result.failure for result in run(pool, ["thread 0.01"] * 16)] == [None] * 16


def test_what_a_cancelled_call_left_ends_with_its_child(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool("score_async", timeout=1.0, concurrency=4)
    before, hung = run(pool, ["pid", f"command {tmp_path / 'pid'}"])
    assert (before.failure, hung.failure) == (None, "timeout")
    assert wait_for(lambda: not alive(int((tmp_path / "pid").read_text())))
    assert run(pool, ["pid"])[0].score != before.score


def test_a_child_that_retires_finishes_its_calls(make_pool: MakePool) -> None:
    pool = make_pool("score_async", timeout=2.0, concurrency=2)
    old = run(pool, ["pid"])[0].score
    (hung,) = pool.submit([RewardInput("await 1000", "")])
    time.sleep(1.0)
    (good,) = pool.submit([RewardInput("await 1.9", "")])
    assert hung.result(10).failure == "timeout"
    assert run(pool, ["pid"])[0].score != old
    assert good.result(10).failure is None
    assert wait_for(lambda: old not in running(pool))


def test_async_calls_run_side_by_side(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool("score_async", concurrency=8)
    together, nine = tmp_path / "together", tmp_path / "nine"
    together.mkdir()
    nine.mkdir()
    # Each call waits until there are 8: one after the other, none would end.
    assert all(result.score == 1.0 for result in run(pool, [f"meet 8 {together}"] * 16))
    assert len(list(together.iterdir())) == 16
    # And never are there 9: so many are begun and wait, and the last does not come.
    futures = pool.submit([RewardInput(f"meet 9 {nine}", "", {}) for _ in range(9)])
    assert wait_for(lambda: len(list(nine.iterdir())) == 8)
    assert not any(future.done() for future in futures)
    (nine / "8").touch()  # in its place
    assert all(future.result(60).score == 1.0 for future in futures[:8])


def test_a_loop_that_is_blocked_for_a_while_costs_nothing(make_pool: MakePool) -> None:
    pool = make_pool("score_async", timeout=1.0, concurrency=4)
    results = run(pool, ["await 0.4", "await 0.4", "block 1.2", "await 0.4"])
    assert [result.failure for result in results] == [None] * 4


@pytest.mark.parametrize(("guilty", "failure"), [("sleep", "timeout"), ("exit", "crash")])
def test_innocents_in_flight_are_repeated(make_pool: MakePool, guilty: str, failure: str) -> None:
    pool = make_pool("score_async", timeout=1.0, concurrency=4)
    results = run(pool, ["await 0.1", "await 0.1", guilty, "await 0.1", "", ""])
    assert [result.failure for result in results] == [None, None, failure, None, None, None]


def test_all_children_are_busy(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(processes=3)
    (tmp_path / "met").mkdir()
    results = run(pool, [f"meet 3 {tmp_path / 'met'}"] * 12)  # each waits for two others
    assert [result.failure for result in results] == [None] * 12
    assert len(running(pool)) == 3


def test_a_quick_function_has_one_process(make_pool: MakePool) -> None:
    pool = make_pool(processes=8)
    pool.start()
    assert len({result.score for result in run(pool, ["pid"] * 50)}) == 1


def test_a_hang_does_not_hold_up_the_others(make_pool: MakePool) -> None:
    pool = make_pool(processes=2)
    hang, *others = pool.submit([RewardInput(text, "") for text in ("sleep", "", "", "")])
    assert [future.result(20).score for future in others] == [1.0] * 3
    assert not hang.done()


def test_a_child_killed_while_idle_costs_nothing(make_pool: MakePool) -> None:
    pool = make_pool()
    for _ in range(3):
        first = run(pool, ["pid"])[0]
        os.kill(int(first.score), signal.SIGKILL)
        second = run(pool, ["pid"])[0]
        assert second.failure is None and second.score != first.score


def test_a_child_killed_while_busy_costs_its_call(make_pool: MakePool, tmp_path: Path) -> None:
    pool, note = make_pool(), tmp_path / "pid"
    pid = int(run(pool, ["pid"])[0].score)
    futures = pool.submit([RewardInput(f"subprocess {note}", "", {}), RewardInput("", "", {})])
    assert wait_for(note.exists)
    os.kill(pid, signal.SIGKILL)
    results = [future.result(10) for future in futures]
    assert [result.failure for result in results] == ["crash", None]
    assert "SIGKILL" in results[0].detail


def test_long_texts_pass_whole(make_pool: MakePool) -> None:
    pool = make_pool("everything")
    long = "\ud800é\n" * 300_000
    items = [
        RewardInput(long, 1, {"n": 2}),
        RewardInput(long, 1, {"n": object(), "m": {1, 2}}),
        RewardInput("", 1, {"n": 3}),
    ]
    results = [future.result(30) for future in pool.submit(items)]
    assert [result.score for result in results] == [2.0 * 900_003, 0.0, 8.0]
    assert results[1].failure == "error"


def test_a_row_that_cannot_be_sent(make_pool: MakePool) -> None:
    row: dict[str, object] = {}
    row["self"] = row
    (future,) = make_pool().submit([RewardInput("", "", row)])
    assert future.result(10).failure == "error"


def test_children_are_replaced_after_their_lifetime(make_pool: MakePool) -> None:
    pids = [result.score for result in run(make_pool(lifetime=2), ["pid"] * 5)]
    assert [pids[0] == pids[1], pids[2] == pids[3], len(set(pids))] == [True, True, 3]


def test_a_start_that_the_system_refuses_is_tried_again(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isotrain.process.pool.PAUSE", 0.05)
    pool = make_pool(lifetime=2)
    run(pool, [""])
    real, refused = subprocess.Popen, [errno.EAGAIN, errno.EMFILE]

    def scarce(*arguments: Any, **options: Any) -> Any:
        if refused:
            raise OSError(refused.pop(), "not now")
        return real(*arguments, **options)

    monkeypatch.setattr("isotrain.process.child.subprocess.Popen", scarce)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert [result.score for result in run(pool, [""] * 3)] == [1.0] * 3
    assert wait_for(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    refused += [errno.EAGAIN] * 3
    with pytest.raises(RewardError, match=r"could not be started: .*not now"):
        run(pool, [""] * 3)


def test_a_replacement_that_cannot_be_loaded_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isotrain.process.pool.PAUSE", 0.05)
    note, path = tmp_path / "note", tmp_path / "rewards.py"
    path.write_text(
        f"import os\nif os.path.exists({str(note)!r}):\n    os.remove({str(note)!r})\n    1 / 0\n"
        "def f(response):\n    return os.getpid()\n"
    )
    pool = Pool(REWARD_CALLS, setup_of(f"{path}:f"), name="reward.function", timeout=5.0, lifetime=1)
    try:
        pool.start()
        note.touch()
        first, second = run(pool, ["", ""])
    finally:
        pool.close()
    assert first.failure is second.failure is None and first.score != second.score
    assert not note.exists()


def test_a_child_that_cannot_be_killed_is_left(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isotrain.process.child.PATIENCE_AFTER_KILL", 0.01)
    monkeypatch.setattr("isotrain.process.child.os.killpg", lambda pid, number: None)
    monkeypatch.setattr("isotrain.process.child._kill_marked", lambda variable: None)
    pool = make_pool(timeout=1.0)
    pid = run(pool, ["pid"])[0].score
    assert [result.failure for result in run(pool, ["sleep", ""])] == ["timeout", None]
    pool.close()
    # It ends by itself, because its pipe is closed.
    assert wait_for(lambda: not alive(int(pid)))


def test_a_hang_ends_what_the_function_started(make_pool: MakePool, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    assert run(make_pool(timeout=1.0), [f"subprocess {note}"])[0].failure == "timeout"
    assert wait_for(lambda: not alive(int(note.read_text())))


@pytest.mark.parametrize(("kind", "failure"), [("session", None), ("session-exit", "crash")])
def test_a_session_of_its_own_does_not_save_a_process(
    make_pool: MakePool, tmp_path: Path, kind: str, failure: str | None
) -> None:
    pool, note = make_pool(), tmp_path / "pid"
    assert run(pool, [f"{kind} {note}"])[0].failure == failure
    pool.close()
    assert wait_for(lambda: not alive(int(note.read_text())))


def test_close_leaves_no_process(make_pool: MakePool) -> None:
    pool = make_pool(processes=2)
    futures = pool.submit([RewardInput(text, "", {}) for text in ("sleep", "busy", "")])
    assert wait_for(lambda: len(running(pool)) == 2)
    time.sleep(0.3)
    pids = running(pool)
    pool.close()
    pool.close()
    assert not any(group_of(pid) for pid in pids)
    for future in futures:
        with pytest.raises(RewardError, match="closed"):
            future.result(0)
    with pytest.raises(RewardError, match="closed"):
        pool.submit([RewardInput("", "", {})])


def test_a_pool_that_was_never_used_closes(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        pool.start()


PARENT = """
import sys, time
from isotrain.process.pool import Pool
from isotrain.rewards.base import RewardInput
from isotrain.rewards.function import read_source
from isotrain.rewards.function import REWARD_CALLS

setup = {"kind": "function", "path": sys.argv[1], "source": read_source(sys.argv[1])}
pool = Pool(REWARD_CALLS, setup, name="x", timeout=1000.0, processes=len(sys.argv) - 2)
pool.submit([RewardInput(text, "", {}) for text in sys.argv[2:]])
while len(pool._workers) < len(sys.argv) - 2:
    time.sleep(0.05)
time.sleep(0.5)
print(*(worker.child.pid for worker in list(pool._workers)), flush=True)
time.sleep(1000)
"""


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    path = write_functions(tmp_path)
    command = [sys.executable, "-c", PARENT, f"{path}:score", "sleep", "busy", ""]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3 and all(alive(pid) for pid in pids)
    finally:
        parent.kill()
        parent.wait()
    assert wait_for(lambda: not any(alive(pid) for pid in pids), seconds=5.0)


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        ("def score(response):\n    return (1\n", "score", r"rewards\.py:2: '\(' was never closed"),
        ("x = 1\n\ny = x / 0\n", "score", r"rewards\.py:3: ZeroDivisionError: division by zero while"),
        ("import nothing_like_this\n", "score", r"rewards\.py:1: ModuleNotFoundError"),
        ("import sys\nsys.exit(1)\n", "score", r"rewards\.py:2: SystemExit: 1"),
        ("def a(answer): ...\ndef b(answer): ...\n", "score", "has no function score; it has a, b"),
        ("score = 3\n", "score", "has no function score"),
        (
            "\n\ndef f(response, prompt): ...\n",
            "f",
            r"rewards\.py:3: f has an unknown parameter prompt; give it a default",
        ),
        ("def f(**more): ...\n", "f", r"rewards\.py:1: f must have at least one of the parameters response,"),
        ("import os\nos._exit(7)\n", "score", "could not be started: .* exit code 7"),
        ("import time\ntime.sleep(1000)\n", "score", r"could not be started: not ready after 1 s"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, source: str, function: str, message: str) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(source, encoding="utf-8")
    pool = Pool(
        REWARD_CALLS,
        setup_of(f"{path}:{function}"),
        name="reward.function",
        timeout=5.0,
        start_timeout=1.0 if "sleep" in source else 60.0,
    )
    try:
        with pytest.raises(RewardError, match=message):
            pool.start()
        with pytest.raises(RewardError, match=message):
            pool.submit([RewardInput("", "", {})])
    finally:
        pool.close()
    assert running(pool) == []


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"reward\.function\.path: there is no file .*/x\.py"):
        read_source(f"{tmp_path}/x.py:f")


def test_a_file_that_changes_changes_nothing_in_a_run(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_bytes(b"# coding: latin-1\ndef f(response):\n    return len('\xe9') / 2\n" + b"#" * 300_000)
    pool = Pool(REWARD_CALLS, setup_of(f"{path}:f"), name="reward.function", timeout=5.0, lifetime=1)
    try:
        pool.start()
        path.write_text("def f(response):\n    return (")
        assert [result.score for result in run(pool, ["", "", ""])] == [0.5] * 3
    finally:
        pool.close()
