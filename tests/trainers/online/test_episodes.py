"""Episodes on an engine: turns of many episodes share it, and none waits for another's environment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotrain.data.trajectory import Trajectory
from isotrain.errors import RolloutError
from isotrain.rollout.base import More, Request, Sampling, no_more, trajectory_of
from isotrain.trainers.online.engine_loop import EngineLoop
from isotrain.trainers.online.episodes import Episodes
from isotrain.trainers.online.messages import PromptRequest, describe
from isotrain.trainers.online.prompt_queue import Supply
from isotrain.weights.update import FileSource, WeightUpdate
from support import tiny_recipe

SAMPLING = Sampling(40)
END = 2

SOURCE = """
import os, time

class Slow:
    async def reset(self, states):
        self.turns = 0
        return {"observation": states["observation"]}

    async def step(self, states):
        self.turns += 1
        end = time.monotonic() + 60
        while states["label"] and not os.path.exists(states["label"]):
            assert time.monotonic() < end, "nobody opened it"
            time.sleep(0.01)
        done = self.turns == 2
        return {"rewards": 1.0, "environment_feedback": " on", "done": done}
"""


class Quick:
    """An engine that writes three tokens at once, and remembers what happened to it, in order."""

    name, updates_in_flight, at_once, version = "engine 1", False, 8, 0

    def __init__(self) -> None:
        self.events: list[Request | WeightUpdate] = []
        self.fails = False

    @property
    def asked(self) -> list[Request]:
        return [event for event in self.events if isinstance(event, Request)]

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: More = no_more
    ) -> Iterator[Trajectory]:
        waiting = [*requests, *more()]
        while waiting:
            request = waiting.pop(0)
            if self.fails:
                raise RolloutError("it broke")
            self.events.append(request)
            tokens_N = np.array([5, 6, END], np.int32)
            yield trajectory_of(request, tokens_N, np.zeros(3, np.float32), self.version, True)
            waiting += more()

    def update_weights(self, update: WeightUpdate) -> None:
        self.events.append(update)
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
        reward={"environment": {}, "answer_key": "gate"},
    )
    engine = Quick()
    loop = EngineLoop(lambda: engine)  # type: ignore[arg-type, return-value]
    episodes = Episodes(recipe, SOURCE, loop)
    try:
        yield episodes, loop, engine
    finally:
        episodes.close()


def play(episodes: Episodes, gates: Sequence[Path | None], n: int = 2) -> Iterator[list[Trajectory]]:
    """A group for each gate; its environment answers once this file is there, at once where it is None."""

    def row(number: int) -> dict[str, Any]:
        return {"prompt": f"Question {number}", "gate": str(gates[number] or "")}

    draws = [PromptRequest(10 + number, number) for number in range(len(gates))]
    supply = Supply(draws, episodes.at_once // n, gradual=True)
    return episodes.generate(supply, row, n, SAMPLING, 0, urgent=False)


def test_groups_come_as_they_end_and_nobody_waits(
    playing: tuple[Episodes, EngineLoop, Quick], tmp_path: Path
) -> None:
    episodes, _, engine = playing
    first_gate, last_gate = tmp_path / "first", tmp_path / "last"
    coming = play(episodes, [first_gate, None, last_gate])
    groups = [next(coming)]  # while the environments of both others keep them
    last_gate.touch()
    groups.append(next(coming))
    first_gate.touch()
    groups += coming
    assert [group[0].prompt_index for group in groups] == [11, 12, 10]
    for group in groups:
        responses = describe(group)
        assert [facts.turns for facts in responses.episodes] == [2, 2]
        assert [t.sample for t in group] == [0, 1] and all(t.finished for t in group)
        for trajectory in group:
            assert trajectory.episode is not None and trajectory.episode.reward == 2.0
            assert trajectory.mask_N.sum() == 6
    turns: dict[tuple[int, int], list[Request]] = {}
    for request in engine.asked:
        turns.setdefault((request.row, request.sample), []).append(request)
    for first, second in turns.values():
        # A turn continues the tokens of the one before, with numbers of its own.
        assert second.prompt_P[: len(first.prompt_P)].tolist() == first.prompt_P.tolist()
        assert second.prompt_P[len(first.prompt_P) :][:3].tolist() == [5, 6, END]
        assert first.seed != second.seed and second.max_tokens < first.max_tokens  # type: ignore[operator]
    assert len({request.seed for request in engine.asked}) == len(engine.asked)


def test_weights_wait_for_the_end_of_episodes(
    playing: tuple[Episodes, EngineLoop, Quick], tmp_path: Path
) -> None:
    episodes, loop, engine = playing
    groups = play(episodes, [tmp_path / "gate"])
    update = WeightUpdate(3, (FileSource("/x"),), 1, 1, "")

    def send() -> None:
        until(lambda: engine.asked)
        sender = threading.Thread(target=loop.update, args=[update], daemon=True)
        sender.start()
        until(lambda: loop._acts)  # it is to be done, and the environments still keep their episodes
        (tmp_path / "gate").touch()
        sender.join(60)

    sending = threading.Thread(target=send)
    sending.start()
    (group,) = groups
    sending.join(60)
    assert engine.version == 3
    assert len(engine.asked) == 4 and engine.events[-1] == update and engine.events.count(update) == 1
    assert all((t.version_N == 0).all() for t in group)


def test_batches_that_overlap_do_not_wait_for_each_other(
    playing: tuple[Episodes, EngineLoop, Quick], tmp_path: Path
) -> None:
    episodes, _, engine = playing
    ended: list[str] = []

    def take(name: str, groups: Iterator[list[Trajectory]]) -> None:
        ended.extend(name for _ in groups)

    slow = threading.Thread(target=take, args=("slow", play(episodes, [tmp_path / "gate"])))
    slow.start()
    until(lambda: engine.asked)
    take("quick", play(episodes, [None, None]))
    (tmp_path / "gate").touch()
    slow.join(60)
    assert ended == ["quick", "quick", "slow"]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_engine_that_fails_ends_all_episodes(playing: tuple[Episodes, EngineLoop, Quick]) -> None:
    episodes, _, engine = playing
    engine.fails = True
    with pytest.raises(RolloutError, match="it broke"):
        list(play(episodes, [None, None]))
    engine.fails = False
    assert len(list(play(episodes, [None]))) == 1


def test_one_that_nobody_waits_for_frees_the_engine(
    playing: tuple[Episodes, EngineLoop, Quick], tmp_path: Path
) -> None:
    episodes, loop, engine = playing
    groups = play(episodes, [None, tmp_path / "never"])
    next(groups)
    groups.close()  # type: ignore[attr-defined]
    updating = threading.Thread(
        target=loop.update, args=[WeightUpdate(1, (FileSource("/x"),), 1, 1, "")], daemon=True
    )
    updating.start()
    updating.join(50)  # less than the environment waits
    assert engine.version == 1
