"""Workers that are killed: engines and reward workers are replaced, a lost rank ends the run and is named."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from online_runs import OnlineRun, drawn, online_recipe, run_online

from isotrain.engine.checkpoint.layout import step_directory, steps_in
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.errors import RETRYABLE
from isotrain.observe.metrics import read_metrics
from isotrain.recipe.schema import Recipe
from support import stable_metrics

pytestmark = pytest.mark.ray

# An async reward that tells when it sleeps, and sleeps long enough to be killed in it.
SLEEPING = """
import asyncio, pathlib

async def score(response, answer):
    mark = pathlib.Path(__file__).with_name("asleep")
    mark.touch()
    await asyncio.sleep(0.3)
    mark.unlink(missing_ok=True)
    return sum(c.isdigit() == (answer == "digits") for c in response) / max(len(response), 1)
"""


def kill(run: OnlineRun, kind: str, *, busy: bool, timeout: float = 120) -> None:
    """Ray names a worker's process after the method that it is running, and after its class alone if none."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for pid in run.workers(kind):
            if ("." in psutil.Process(pid).cmdline()[0].split("::")[1]) == busy:
                os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.001)
    raise AssertionError(f"no {kind} was {'busy' if busy else 'idle'}:\n{run.text}")


def kill_rank(run: OnlineRun) -> int:
    """The end of the only rank ends the run in time; returns which process it was."""
    (rank,) = run.workers("PolicyRank")
    os.kill(rank, signal.SIGKILL)
    killed = time.monotonic()
    assert run.wait(60) == RETRYABLE
    assert time.monotonic() - killed < 60
    return rank


def assert_valid_checkpoint(run: Path) -> None:
    root = run / "checkpoints"
    readers = [CheckpointReader(step_directory(root, step)) for step in steps_in(root)]
    assert readers and all(reader.problems() == [] for reader in readers)


@pytest.mark.timeout(600)
def test_engine_and_reward_worker_are_replaced_and_a_rank_ends_the_run(tiny: Path, tmp_path: Path) -> None:
    recipe = online_recipe(tiny, tmp_path / "run", trainer={"steps": 400, "save_every": 2})
    run = OnlineRun(recipe, tmp_path)
    try:
        run.wait_for_steps(2)
        for kind, words in (("RolloutWorker", "rollout engine 0"), ("RewardWorker", "reward worker 0")):
            (victim,) = run.workers(kind)
            os.kill(victim, signal.SIGKILL)
            run.wait_for_steps(run.steps() + 3)
            assert f"warning: {words}" in run.text and "a new worker replaces it" in run.text
            assert run.workers(kind) != [victim]
        kill_rank(run)
    finally:
        run.end()
    assert "error: training rank 0" in run.text, run.text
    # What a resumed run starts from, and every draw of every step exactly once up to there.
    assert_valid_checkpoint(tmp_path / "run")
    places = [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert places == list(range(1, len(places) + 1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_engines_draw_from_a_queue_that_can_die(tiny: Path, tmp_path: Path) -> None:
    recipe = online_recipe(
        tiny,
        tmp_path / "run",
        trainer={"steps": 6},
        rollout={"engines": 2, "record": True},
        device={"ranks": 2},
    )
    run = OnlineRun(recipe, tmp_path)
    try:
        run.wait_for_steps(1)
        assert len(run.workers("RolloutWorker")) == 2
        for kind, words in (("PromptQueue", "prompt queue 0"), ("RolloutWorker", "rollout engine")):
            os.kill(run.workers(kind)[0], signal.SIGKILL)
            run.wait_for_steps(run.steps() + 2)
            assert f"warning: {words}" in run.text, run.text
        written = run.finish()
    finally:
        run.end()
    # Every prompt once, with all of its responses, whoever wrote them.
    places = [(prompt, sample) for step in drawn(written) for prompt, _, sample in step]
    assert sorted(places) == [(prompt, sample) for prompt in range(6 * 4) for sample in range(4)]


def sleeping(tiny: Path, output: Path, function: Path) -> Recipe:
    function.parent.mkdir(exist_ok=True)
    function.write_text(SLEEPING)
    return online_recipe(
        tiny,
        output,
        trainer={"steps": 12, "save_every": 2},
        rollout={"engine": "hf", "n": 4, "max_tokens": 24, "record": True},
        reward={"function": {"path": f"{function}:score"}, "answer_key": "answer"},
    )


@pytest.fixture(scope="module")
def calm(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which nobody dies."""
    work = tmp_path_factory.mktemp("calm")
    return OnlineRun(sleeping(tiny, work / "run", work / "reward" / "rewards.py"), work).finish(900)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_rank_that_is_killed_while_responses_are_scored_ends_the_run(
    tiny: Path, tmp_path: Path, staleness: int
) -> None:
    """Nobody waits for the rank then, and would not for minutes."""
    slow = tmp_path / "slow.py"
    slow.write_text("import time\n\n\ndef score(response):\n    time.sleep(300)\n    return 1.0\n")
    recipe = online_recipe(
        tiny,
        tmp_path / "run",
        reward={"function": {"path": f"{slow}:score"}, "timeout": 400},
        rollout={"staleness": staleness},
        cluster={"placement": "separate" if staleness else "colocated"},
    )
    run = OnlineRun(recipe, tmp_path)
    try:
        deadline = time.monotonic() + 240
        while "hf engine: " not in run.text:
            assert run.process.poll() is None and time.monotonic() < deadline, run.text
            time.sleep(0.1)
        time.sleep(5)
        rank = kill_rank(run)
    finally:
        run.end()
    assert f"error: training rank 0 on 127.0.0.1 (pid {rank}) died: " in run.text, run.text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_reward_file_has_started_ends_with_the_run(tiny: Path, tmp_path: Path) -> None:
    note, path = tmp_path / "pid", tmp_path / "reward.py"
    path.write_text(
        "import subprocess\n"
        "server = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        f"open({str(note)!r}, 'w').write(str(server.pid))\n"
        "def score(response):\n    return float(len(response) % 3)\n"
    )
    reward = {"function": {"path": f"{path}:score"}}
    run_online(online_recipe(tiny, tmp_path / "run", reward=reward, trainer={"steps": 1}), tmp_path)
    assert not psutil.pid_exists(int(note.read_text()))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_deaths_do_not_change_what_is_learnt(tiny: Path, tmp_path: Path, calm: Path) -> None:
    """Draws that died with an engine are generated again, with the same seeds and weights."""
    function = tmp_path / "reward" / "rewards.py"
    run = OnlineRun(sleeping(tiny, tmp_path / "run", function), tmp_path)
    try:
        run.wait_for_steps(1)
        kill(run, "RolloutWorker", busy=True)
        run.wait_for_steps(3)
        while not (function.parent / "asleep").exists():
            time.sleep(0.01)
        os.kill(run.workers("RewardWorker")[0], signal.SIGKILL)
        run.wait_for_steps(6)
        kill(run, "RolloutWorker", busy=False)
        wild = run.finish(900)
    finally:
        run.end()
    assert run.text.count("a new worker replaces it") == 3, run.text
    assert stable_metrics(wild) == stable_metrics(calm) and drawn(wild) == drawn(calm)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("busy", [True, False])
def test_a_run_whose_rank_died_goes_on_exactly(tiny: Path, tmp_path: Path, calm: Path, busy: bool) -> None:
    recipe = sleeping(tiny, tmp_path / "run", tmp_path / "reward" / "rewards.py")
    first = OnlineRun(recipe, tmp_path, "first")
    try:
        first.wait_for_steps(5)
        kill(first, "PolicyRank", busy=busy)
        assert first.wait(120) == RETRYABLE and "error: training rank 0" in first.text
    finally:
        first.end()
    assert_valid_checkpoint(tmp_path / "run")
    second = OnlineRun(recipe, tmp_path, "second")
    run = second.finish(900)
    assert "resuming after step" in second.text
    assert stable_metrics(run) == stable_metrics(calm) and drawn(run) == drawn(calm)
