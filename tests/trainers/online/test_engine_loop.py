"""The thread that owns an engine: who is served when, when weights are taken, and how errors spread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from isotrain.children import in_background
from isotrain.data.trajectory import Trajectory
from isotrain.errors import EngineLost, RolloutError, WeightUpdateError
from isotrain.rollout.base import More, Request, Sampling, no_more, trajectory_of
from isotrain.trainers.online.engine_loop import EngineLoop, Prompts
from isotrain.trainers.online.messages import PromptRequest
from isotrain.trainers.online.prompt_queue import Supply
from isotrain.weights.update import FileSource, WeightUpdate

SECONDS = 20.0
SAMPLED, GREEDY = Sampling(64), Sampling(64, temperature=0.0)


class Steps:
    """An engine that a test lets write one token after the other.

    Response `sample` of draw `prompt_index` has `length(prompt_index, sample)` tokens.
    """

    name, updates_in_flight, at_once = "engine 7", True, 4

    def __init__(self, length: Callable[[int, int], int] = lambda prompt_index, sample: 2) -> None:
        self.length, self.version = length, 0
        self.log: list[Any] = []
        """What happened, in order: draws that began with their version, updates, ends of `generate`."""
        self.widths: list[int] = []
        """Responses under way at each token."""
        self._may = threading.Semaphore(0)
        self.fails: Exception | None = None

    def step(self, tokens: int = 1) -> None:
        self._may.release(tokens)

    def wait_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not reached():
            assert time.monotonic() < deadline, self.log
            time.sleep(0.001)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: More = no_more
    ) -> Iterator[Trajectory]:
        assert threading.current_thread().name == "engine"
        running: list[tuple[Request, list[int]]] = []
        try:
            while True:
                for request in [*requests, *more()]:
                    running.append((request, []))
                    if request.sample == 0:
                        self.log.append((request.prompt_index, self.version))
                requests = ()
                if not running:
                    return
                assert self._may.acquire(timeout=SECONDS), "no test waits so long"
                if self.fails is not None:
                    raise self.fails
                self.widths.append(len(running))
                for request, versions in list(running):
                    versions.append(self.version)
                    if len(versions) == self.length(request.prompt_index, request.sample):
                        running.remove((request, versions))
                        tokens_N = np.zeros(len(versions), np.int32)
                        version_N = np.array(versions, np.int32)
                        logp_N = tokens_N.astype(np.float32)
                        yield trajectory_of(request, tokens_N, logp_N, version_N, True)
        finally:
            self.log.append("end")

    def update_weights(self, update: Any) -> None:
        assert threading.current_thread().name == "engine"
        if update.digest == "bad":
            raise WeightUpdateError("damaged")
        if update.digest == "lost":
            raise EngineLost("no reply")
        self.version = update.version
        self.log.append(f"update {update.version}")

    def close(self) -> None:
        self.log.append("closed")


def update(version: int, digest: str = "") -> WeightUpdate:
    return WeightUpdate(version, (FileSource(""),), 0, 0, digest)


class Loop(EngineLoop):
    def __init__(self, engine: Steps, in_flight: bool = True) -> None:
        super().__init__(lambda: engine, in_flight)  # type: ignore[arg-type,return-value]
        self.steps = engine

    def prompts(
        self, draws: Sequence[int], n: int = 2, sampling: Sampling = SAMPLED, **options: Any
    ) -> Prompts:
        prompts = [PromptRequest(draw, draw) for draw in draws]
        supply = Supply(prompts, max(1, self.engine.at_once // n), gradual=self.in_flight)
        return Prompts(supply, lambda taken: requests(taken, n), n, sampling, **options)

    def ask(self, draws: Sequence[int], **options: Any) -> Future[list[list[Trajectory]]]:
        """Groups of a call that has reached the loop, which somebody else waits for."""
        prompts, calls = self.prompts(draws, **options), len(self._calls)
        future = in_background(lambda: list(self.generate(prompts)))
        with self._changed:  # nobody is told of a call that comes; none of these tests needs to know sooner
            assert self._changed.wait_for(lambda: len(self._calls) != calls, SECONDS)
        return future

    def send(self, version: int, digest: str = "") -> Future[None]:
        acts = len(self._acts)
        future = in_background(lambda: self.update(update(version, digest)))
        with self._changed:
            self._changed.wait_for(lambda: future.done() or len(self._acts) != acts, SECONDS)
        return future


def requests(taken: Sequence[PromptRequest], n: int) -> list[Request]:
    prompt_P = np.zeros(1, np.int32)
    return [Request(row, index, sample, 0, prompt_P) for index, row in taken for sample in range(n)]


def draws(groups: list[list[Trajectory]]) -> list[int]:
    return sorted(group[0].prompt_index for group in groups)


def test_the_next_call_begins_while_the_last_response_of_the_first_is_written() -> None:
    """Room for 4 responses; one of the first call is long."""
    engine = Steps(lambda draw, sample: 9 if (draw, sample) == (0, 0) else 2)
    loop = Loop(engine)
    first, second = loop.ask([0, 1]), loop.ask([2, 3, 4])
    engine.step(20)
    assert draws(second.result(SECONDS)) == [2, 3, 4] and draws(first.result(SECONDS)) == [0, 1]
    assert engine.widths[:2] == [4, 4] and max(engine.widths) <= 4
    # Two ended responses make room for the next two; with the long one, three are under way.
    assert engine.widths[2:8] == [3, 3, 3, 3, 3, 3]
    assert [draw for draw, _ in engine.log[:-1]] == [0, 1, 2, 3, 4]


def test_a_narrow_call_keeps_the_next_ones_as_narrow() -> None:
    engine = Steps(lambda draw, sample: 3)
    loop = Loop(engine)
    calls = [loop.ask([draw]) for draw in range(3)]
    engine.step(20)
    assert [draws(call.result(SECONDS)) for call in calls] == [[0], [1], [2]]
    assert set(engine.widths) == {2}


def test_a_small_call_gets_the_next_free_places_of_a_large_one() -> None:
    """As lost responses that are generated again: it does not wait until the engine is empty."""
    engine = Steps(lambda draw, sample: 1 + 4 * draw)
    loop = Loop(engine)
    large = loop.ask([0, 1, 2])
    engine.step(1)
    small = loop.ask([3])
    engine.step(40)
    assert draws(small.result(SECONDS)) == [3] and draws(large.result(SECONDS)) == [0, 1, 2]
    began = [entry for entry in engine.log if isinstance(entry, tuple)]
    assert began == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert engine.widths[5] == 4, "it does not wait for the longest response of the large one"


def test_without_it_calls_come_one_after_the_other() -> None:
    engine = Steps()
    loop = Loop(engine, in_flight=False)
    for version in (1, 2):
        future = loop.ask([0, 1, 2])
        engine.step(2)
        assert draws(future.result(SECONDS)) == [0, 1, 2]
        loop.update(update(version))
    assert engine.widths == [6] * 4, "a list is given to the engine at once"
    assert engine.log == [
        *[(draw, 0) for draw in range(3)],
        "end",
        "update 1",
        *[(draw, 1) for draw in range(3)],
        "end",
        "update 2",
    ]


def test_responses_under_way_go_on_with_new_weights() -> None:
    engine = Steps(lambda draw, sample: 4)
    loop = Loop(engine)
    responses = loop.ask([0])
    engine.step(2)
    engine.wait_until(lambda: len(engine.widths) == 2)
    sent = loop.send(1)
    engine.step(2)
    sent.result(SECONDS)
    ((one, other),) = responses.result(SECONDS)
    # The engine may have asked for the third token before the update came, and not after it.
    assert one.version_N.tolist() == other.version_N.tolist() in ([0, 0, 1, 1], [0, 0, 0, 1])
    assert [entry for entry in engine.log if entry != "end"] == [(0, 0), "update 1"]


def test_no_prompt_begins_before_the_update_that_its_call_names() -> None:
    engine = Steps(lambda draw, sample: 3)
    loop = Loop(engine)
    before, after = loop.ask([0]), loop.ask([1], version=2)
    engine.step(20)
    assert draws(before.result(SECONDS)) == [0] and not after.done()
    loop.update(update(1))
    assert not after.done()
    loop.update(update(2))
    assert draws(after.result(SECONDS)) == [1]
    assert [entry for entry in engine.log if entry != "end"] == [(0, 0), "update 1", "update 2", (1, 2)]


def test_another_sampling_waits_for_the_calls_before_and_the_next_ones_for_it() -> None:
    engine = Steps()
    loop = Loop(engine)
    calls = [loop.ask([0]), loop.ask([1], sampling=GREEDY, n=1), loop.ask([2])]
    engine.step(20)
    assert [draws(call.result(SECONDS)) for call in calls] == [[0], [1], [2]]
    assert engine.log == [(0, 0), "end", (1, 0), "end", (2, 0), "end"]


def test_who_is_urgent_waits_only_for_what_is_under_way() -> None:
    engine = Steps()
    loop = Loop(engine)
    waiting = [loop.ask([0, 1]), loop.ask([2, 3])]
    engine.wait_until(lambda: len(engine.log) == 2)
    urgent = loop.ask([-1], sampling=GREEDY, n=1, urgent=True)
    engine.step(20)
    assert draws(urgent.result(SECONDS)) == [-1]
    assert [draws(call.result(SECONDS)) for call in waiting] == [[0, 1], [2, 3]]
    assert [entry[0] for entry in engine.log if entry != "end"] == [0, 1, -1, 2, 3]


def test_an_error_of_the_engine_reaches_all_calls_and_the_next_update_is_run() -> None:
    engine = Steps()
    loop = Loop(engine)
    calls = [loop.ask([0, 1]), loop.ask([2]), loop.ask([3], sampling=GREEDY), loop.ask([4], version=9)]
    engine.fails = RolloutError("out of memory")
    sent = loop.send(1)
    engine.step()
    for call in calls:
        with pytest.raises(RolloutError, match="out of memory"):
            call.result(SECONDS)
    sent.result(SECONDS)
    engine.fails = None
    after = loop.ask([5])
    engine.step(2)
    assert draws(after.result(SECONDS)) == [5]


def test_an_update_that_fails_is_told_to_who_sent_it() -> None:
    """What it means for responses is the engine's to say: a real one ends the generation."""
    engine = Steps()
    loop = Loop(engine)
    with pytest.raises(WeightUpdateError, match="damaged"):
        loop.update(update(3, "bad"))
    waits = loop.ask([0], version=3)
    engine.step(2)
    assert draws(waits.result(SECONDS)) == [0], "nobody waits for weights that will not come"


def test_an_engine_that_is_lost_in_an_update_is_lost_for_all() -> None:
    engine = Steps()
    loop = Loop(engine)
    call = loop.ask([0])
    engine.wait_until(lambda: len(engine.log) == 1)
    sent = loop.send(1, "lost")
    engine.step()
    for future in (sent, call):
        with pytest.raises(EngineLost, match="no reply"):
            future.result(SECONDS)


def test_a_call_that_is_given_up_stops_nobody() -> None:
    engine = Steps(lambda draw, sample: 5 if draw == 1 else 2)
    loop = Loop(engine)
    abandoned = loop.generate(loop.prompts([0, 1]))
    engine.step(2)
    assert next(abandoned)[0].prompt_index == 0
    other = loop.ask([2])
    abandoned.close()  # type: ignore[attr-defined]
    engine.step(20)
    assert draws(other.result(SECONDS)) == [2]
    assert max(engine.widths) == 4, "what was begun counts until it ends"


def test_the_last_call_that_is_given_up_ends_the_generation() -> None:
    engine = Steps(lambda draw, sample: 2 + 90 * draw)
    loop = Loop(engine)
    abandoned = loop.generate(loop.prompts([0, 1]))
    engine.step(2)
    next(abandoned)
    abandoned.close()  # type: ignore[attr-defined]
    engine.step()
    loop.update(update(1))
    assert engine.log[-1] == "update 1" and (loop._owners, loop._unfinished) == ({}, 0)


def test_closing_ends_calls_and_the_engine() -> None:
    engine = Steps()
    loop = Loop(engine)
    call = loop.ask([0])
    engine.wait_until(lambda: len(engine.log) == 1)
    closing = in_background(loop.close)
    with pytest.raises(RolloutError, match="engine 7 was closed"):
        call.result(SECONDS)
    engine.step(1)
    closing.result(SECONDS)
    assert engine.log == [(0, 0), "end", "closed"]


def test_an_engine_that_gives_less_than_it_was_asked_for_ends_the_call() -> None:
    """Its draws are missing, and asked for again."""

    class Forgetful(Steps):
        def generate(self, requests: Sequence[Request], sampling: Sampling, more: More = no_more) -> Any:
            found = super().generate(requests, sampling, more)
            return (trajectory for trajectory in found if trajectory.prompt_index)

    engine = Forgetful()
    call = Loop(engine).ask([0, 1])
    engine.step(20)
    assert draws(call.result(SECONDS)) == [1]


def test_what_fails_to_start_says_why() -> None:
    def build() -> Any:
        raise RolloutError("vLLM did not start")

    with pytest.raises(RolloutError, match="vLLM did not start"):
        EngineLoop(build)
