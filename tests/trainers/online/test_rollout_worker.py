"""The rollout worker as a plain object: how it ends."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from online_runs import online_recipe

from isotrain.errors import EngineLost, RolloutError
from isotrain.recipe.load import resolved
from isotrain.rollout.base import Sampling
from isotrain.trainers.online.messages import PromptRequest
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.weights.file import write_update

CHECK_T = np.arange(3, 12, dtype=np.int32)


@pytest.fixture
def worker(tiny: Path, tmp_path: Path) -> RolloutWorker:
    return RolloutWorker(resolved(online_recipe(tiny, tmp_path / "run")), "rollout engine 0")


def test_it_can_be_closed_at_any_time(worker: RolloutWorker) -> None:
    worker.close()
    worker.start()
    assert len(worker.weight_check([CHECK_T])) == len(CHECK_T) - 1
    worker.close()
    worker.close()
    with pytest.raises(RolloutError, match="it was closed"):
        worker.weight_check([CHECK_T])


def test_its_process_ends_with_a_lost_engine(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its controller takes the end of a process for a death, and starts another."""

    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    def lose(*_: object) -> None:
        raise EngineLost("rollout engine 0: a worker has ended")

    worker.start()
    monkeypatch.setattr(os, "_exit", end)
    for method in ("update_weights", "generate", "logps", "sleep", "wake"):
        monkeypatch.setattr(worker.engine, method, lose)
    update = write_update([], 1)
    for act in (
        lambda: worker.update(update),
        lambda: list(worker.generate("train", [PromptRequest(0, 0)], 1, Sampling(4))),
        lambda: worker.weight_check([CHECK_T]),
        worker.sleep,
        worker.wake,
    ):
        with pytest.raises(Ended, match="1"):
            act()
        assert capsys.readouterr().err.endswith("rollout engine 0: a worker has ended\n")
