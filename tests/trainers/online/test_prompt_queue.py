"""One queue for all engines: nothing is lost or doubled, and who is fast writes more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isotrain.trainers.online.messages import PromptRequest
from isotrain.trainers.online.prompt_queue import Draws, PromptQueue, Supply


class Here:
    """In the place of a peer in another process, and of its reply, which is there when `quick`."""

    def __init__(self, queue: PromptQueue | None) -> None:
        self.queue, self.calls, self.quick = queue, 0, True
        self.reply: Any = None

    def submit(self, method: Callable[..., Any], *args: Any) -> Here:
        self.calls += 1
        self.reply = None if self.queue is None else method(self.queue, *args)
        return self

    def is_there(self) -> bool:
        return self.quick

    def wait(self) -> Any:
        return self.reply


def prompts(count: int) -> list[PromptRequest]:
    return [PromptRequest(index, index) for index in range(count)]


def draws(count: int, engines: int, lost: bool = False) -> Draws:
    queue = PromptQueue()
    queue.fill(7, prompts(count))
    return Draws(Here(None if lost else queue), 7, -(-count // engines))  # type: ignore[arg-type]


def test_batches_that_overlap_are_kept_apart() -> None:
    queue = PromptQueue()
    queue.fill(0, prompts(3))
    queue.fill(1, prompts(5)[3:])
    assert queue.draw(0, 2) == prompts(2)
    assert queue.draw(1, 9) == prompts(5)[3:]
    assert queue.draw(0, 2) == prompts(3)[2:]
    assert queue.draw(0, 2) == queue.draw(5, 2) == []


def test_a_list_is_given_at_once_and_without_a_limit() -> None:
    supply = Supply(prompts(9), room=2)
    assert supply.take(0) == prompts(9)
    assert not supply.take(9)


def test_the_first_engine_leaves_the_others_their_share() -> None:
    shared = draws(8, engines=2)
    first, second = Supply(shared, room=100), Supply(shared, room=100)
    assert first.take(0) == prompts(4)
    assert not first.take(4)
    assert second.take(0) == prompts(8)[4:]
    assert not first.take(3) and not first.take(0) and not second.take(0)


def test_who_is_fast_writes_more() -> None:
    """Both have room for 2 prompts and one that waits; one finishes a prompt each turn, the other none."""
    shared = draws(12, engines=2)
    fast, slow = Supply(shared, room=2), Supply(shared, room=2)
    taken = {"fast": list(fast.take(0)), "slow": list(slow.take(0))}
    assert [len(own) for own in taken.values()] == [3, 3]
    for _ in range(8):
        taken["fast"] += fast.take(2)
        taken["slow"] += slow.take(3)
    assert len(taken["fast"]) == 9 and len(taken["slow"]) == 3
    assert sorted(taken["fast"] + taken["slow"]) == prompts(12)


def test_an_engine_that_has_prompts_does_not_wait_for_more() -> None:
    shared = draws(12, engines=2)
    supply = Supply(shared, room=2)
    assert len(supply.take(0)) == 3
    shared.queue.quick = False  # type: ignore[attr-defined]
    assert not supply.take(2) and not supply.take(1)
    assert shared.queue.calls == 2, "one question at a time"  # type: ignore[attr-defined]
    assert supply.take(0) == prompts(4)[3:], "idle, it waits for the reply"


def test_an_empty_queue_is_not_asked_again() -> None:
    shared = draws(2, engines=1)
    supply = Supply(shared, room=10)
    assert supply.take(0) == prompts(2)
    assert not supply.take(0)
    calls = shared.queue.calls  # type: ignore[attr-defined]
    assert not supply.take(0) and shared.queue.calls == calls  # type: ignore[attr-defined]


def test_a_lost_queue_ends_the_work() -> None:
    assert not Supply(draws(4, engines=2, lost=True), room=9).take(0)
