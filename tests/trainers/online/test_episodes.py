"""Episodes on an engine: turns of many episodes share it, and none waits for another's environment."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotrain.data.trajectory import Trajectory
from isotrain.errors import RolloutError
from isotrain.rollout.base import More, Request, Sampling, WeightUpdate, no_more, trajectory_of
from isotrain.trainers.online.engine_loop import EngineLoop
from isotrain.trainers.online.episodes import Episodes
from isotrain.trainers.online.messages import PromptRequest, describe
from isotrain.trainers.online.prompt_queue import Supply
from support import tiny_recipe

SAMPLING = Sampling(40)
END = 2

SOURCE = """
import asyncio, time

class Slow:
    async def reset(self, states):
        self.turns = 0
        return {"observation": states["observation"]}

    async def step(self, states):
        self.turns += 1
        time.sleep(float(states["label"]))
        done = self.turns == 2
        return {"rewards": 1.0, "environment_feedback": " on", "done": done}
"""


class Quick:
    """An engine that writes three tokens at once, and remembers what it was asked for and when."""

    name, updates_in_flight, at_once, version = "engine 1", False, 8, 0

    def __init__(self) -> None:
        self.asked: list[tuple[float, Request]] = []
        self.updates: list[tuple[float, int]] = []
        self.fails = False

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: More = no_more
    ) -> Iterator[Trajectory]:
        waiting = [*requests, *more()]
        while waiting:
            request = waiting.pop(0)
            if self.fails:
                raise RolloutError("it broke")
            self.asked.append((time.monotonic(), request))
            tokens_N = np.array([5, 6, END], np.int32)
            yield trajectory_of(request, tokens_N, np.zeros(3, np.float32), self.version, True)
            waiting += more()

    def update_weights(self, update: WeightUpdate) -> None:
        self.updates.append((time.monotonic(), update.version))
        self.version = update.version


@pytest.fixture
def playing(tiny: Path, tmp_path: Path) -> Iterator[tuple[Episodes, EngineLoop, Quick]]:
    (tmp_path / "slow.py").write_text(SOURCE)
    recipe = tiny_recipe(
        tiny,
        tmp_path / "out",
        "cpu",
        data={"train": str(tiny / "questions.jsonl"), "max_length": 64, "batch_size": 4},
        algorithm={"name": "grpo"},
        rollout={
            "engine": "hf",
            "n": 2,
            "max_tokens": 40,
            "environment": {"path": f"{tmp_path}/slow.py:Slow"},
        },
        reward={"environment": {}, "answer_key": "seconds"},
    )
    engine = Quick()
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type, return-value]
    episodes = Episodes(recipe, SOURCE, loop)
    try:
        yield episodes, loop, engine
    finally:
        episodes.close()


def row(number: int, seconds: Sequence[float]) -> dict[str, Any]:
    return {"prompt": f"Question {number}", "seconds": str(seconds[number])}


def play(episodes: Episodes, seconds: Sequence[float], n: int = 2) -> Iterator[list[Trajectory]]:
    draws = [PromptRequest(10 + number, number) for number in range(len(seconds))]
    supply = Supply(draws, episodes.at_once // n, gradual=True)
    return episodes.generate(supply, lambda number: row(number, seconds), n, SAMPLING, 0, urgent=False)


def test_groups_come_as_they_end_and_nobody_waits(
    playing: tuple[Episodes, EngineLoop, Quick],
) -> None:
    episodes, _, engine = playing
    started = time.monotonic()
    groups = list(play(episodes, [1.0, 0.0, 0.3]))
    took = time.monotonic() - started
    assert [group[0].prompt_index for group in groups] == [11, 12, 10]
    # One after the other it would be 2 episodes of 2 turns each: 5.2 s.
    assert took < 4.0
    for group in groups:
        responses = describe(group)
        assert [facts.turns for facts in responses.episodes] == [2, 2]
        assert [t.sample for t in group] == [0, 1] and all(t.finished for t in group)
        for trajectory in group:
            assert trajectory.episode is not None and trajectory.episode.reward == 2.0
            assert trajectory.mask_N.sum() == 6
    turns: dict[tuple[int, int], list[Request]] = {}
    for _, request in engine.asked:
        turns.setdefault((request.row, request.sample), []).append(request)
    for first, second in turns.values():
        # A turn continues the tokens of the one before, with numbers of its own.
        assert second.prompt_P[: len(first.prompt_P)].tolist() == first.prompt_P.tolist()
        assert second.prompt_P[len(first.prompt_P) :][:3].tolist() == [5, 6, END]
        assert first.seed != second.seed and second.max_tokens < first.max_tokens  # type: ignore[operator]
    assert len({request.seed for _, request in engine.asked}) == len(engine.asked)


def test_weights_wait_for_the_end_of_episodes(playing: tuple[Episodes, EngineLoop, Quick]) -> None:
    episodes, loop, engine = playing
    groups = play(episodes, [0.4])
    update = WeightUpdate(3, "/x", 1, 1, "")

    def send() -> None:
        while not engine.asked:
            time.sleep(0.01)
        loop.update(update)

    sender = threading.Thread(target=send)
    sender.start()
    (group,) = groups
    sender.join(20)
    assert not sender.is_alive() and engine.version == 3
    assert engine.updates[0][0] > engine.asked[-1][0]
    assert all((t.version_N == 0).all() for t in group)


def test_batches_that_overlap_do_not_wait_for_each_other(
    playing: tuple[Episodes, EngineLoop, Quick],
) -> None:
    episodes, _, engine = playing
    slow, quick = play(episodes, [1.5]), play(episodes, [0.0, 0.0])
    ended: dict[str, float] = {}

    def take(name: str, groups: Iterator[list[Trajectory]]) -> None:
        list(groups)
        ended[name] = time.monotonic()

    threads = [threading.Thread(target=take, args=one) for one in (("slow", slow), ("quick", quick))]
    for thread in threads:
        thread.start()
        while not engine.asked:  # the slow ones are first
            time.sleep(0.01)
    for thread in threads:
        thread.join(20)
    assert ended["slow"] - ended["quick"] > 1.0


def test_an_engine_that_fails_ends_all_episodes(playing: tuple[Episodes, EngineLoop, Quick]) -> None:
    episodes, _, engine = playing
    engine.fails = True
    with pytest.raises(RolloutError, match="it broke"):
        list(play(episodes, [0.0, 0.0]))
    engine.fails = False
    assert len(list(play(episodes, [0.0]))) == 1


def test_one_that_nobody_waits_for_frees_the_engine(playing: tuple[Episodes, EngineLoop, Quick]) -> None:
    episodes, loop, _ = playing
    groups = play(episodes, [0.0, 5.0])
    next(groups)
    groups.close()  # type: ignore[attr-defined]
    started = time.monotonic()
    loop.update(WeightUpdate(1, "/x", 1, 1, ""))
    assert time.monotonic() - started < 3.0
