"""Workers that are killed: engines and reward workers are replaced, a lost rank ends the run and is named."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from online_runs import OnlineRun, online_recipe, run_online

from isotrain.engine.checkpoint.layout import steps_in
from isotrain.observe.metrics import read_metrics
from support import stable_metrics


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
            assert f"warning: {words}" in run.text and "takes its place" in run.text
            assert run.workers(kind) != [victim]
        (rank,) = run.workers("PolicyRank")
        os.kill(rank, signal.SIGKILL)
        killed = time.monotonic()
        assert run.wait(60) == 1
        assert time.monotonic() - killed < 60
    finally:
        run.end()
    assert "error: training rank 0" in run.text, run.text
    # What a resumed run starts from, and every draw of every step exactly once up to there.
    assert steps_in(tmp_path / "run" / "checkpoints")
    places = [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert places == list(range(1, len(places) + 1))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_rank_that_is_killed_while_answers_are_scored_ends_the_run(
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
        (rank,) = run.workers("PolicyRank")
        os.kill(rank, signal.SIGKILL)
        killed = time.monotonic()
        assert run.wait(60) == 1
        assert time.monotonic() - killed < 60
    finally:
        run.end()
    assert f"error: training rank 0 on 127.0.0.1 (pid {rank}) died: " in run.text, run.text


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_deaths_do_not_change_what_is_learnt(tiny: Path, tmp_path: Path) -> None:
    """Draws that died with an engine are answered again, with the same seeds and weights."""
    calm = OnlineRun(online_recipe(tiny, tmp_path / "calm", trainer={"steps": 12}), tmp_path, "calm").finish()
    run = OnlineRun(online_recipe(tiny, tmp_path / "wild", trainer={"steps": 12}), tmp_path, "wild")
    for step, kind in ((2, "RolloutWorker"), (5, "RewardWorker"), (8, "RolloutWorker")):
        run.wait_for_steps(step)
        os.kill(run.workers(kind)[0], signal.SIGKILL)
    assert stable_metrics(run.finish()) == stable_metrics(calm)


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
