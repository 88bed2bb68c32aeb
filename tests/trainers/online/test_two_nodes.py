"""Runs over two Ray nodes, which stand for two machines: weights reach engines where no rank writes them."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from online_runs import OnlineRun, online_recipe, run_online, workers_below
from ray.cluster_utils import Cluster as Machines

from isotrain.observe.metrics import read_metrics
from isotrain.recipe.schema import Recipe
from isotrain.weights.file import PREFIX
from ray_machines import two_machines
from support import stable_metrics

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]

# An engine on the other node than the only rank; ranks on both nodes, each with an engine.
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "separate": {"cluster": {"placement": "separate"}},
    "both": {"device": {"ranks": 2}, "rollout": {"engines": 2}},
}

RELAYS = {"separate": 1, "both": 0}


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with two_machines(object_store_memory=200 << 20) as cluster:
        yield cluster


def layout(tiny: Path, output: Path, name: str, address: str, steps: int) -> Recipe:
    own = LAYOUTS[name]
    return online_recipe(
        tiny,
        output,
        device={"type": "cpu", **own.get("device", {})},
        data={
            "train": str(tiny / "prompts.jsonl"),
            "batch_size": 8,
            "max_length": 64,
            "tokens_per_micro_batch": 512,
        },
        rollout={"engine": "hf", "n": 8, "max_tokens": 8, **own.get("rollout", {})},
        cluster={"address": address, **own.get("cluster", {})},
        trainer={"steps": steps},
    )


def abandoned() -> set[Path]:
    """Copies of weights in shared memory whose processes have ended: these hold a lock while they run."""
    found = set()
    for path in Path("/dev/shm").glob(f"{PREFIX}*"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.add(path)
            finally:
                os.close(descriptor)
    return found


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_two_nodes_do_what_one_does(tiny: Path, tmp_path: Path, machines: Machines, name: str) -> None:
    before = abandoned()
    one = run_online(layout(tiny, tmp_path / "one", name, "local", 1), tmp_path, "one", timeout=900)
    assert not abandoned() - before
    run = OnlineRun(layout(tiny, tmp_path / "two", name, machines.address, 30), tmp_path, "two")
    try:
        run.wait_for_trained(3, 900)
        # The weights went through a relay, where no rank of the machine writes them, and go on to do so after
        # it and the engines have died.
        relays = workers_below(os.getpid(), "Relay")
        assert len(relays) == RELAYS[name]
        engines = workers_below(os.getpid(), "RolloutWorker")
        victims = engines + relays
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        run.wait_for_trained(run.trained() + 3, 900)
        assert not set(engines) & set(workers_below(os.getpid(), "RolloutWorker"))
        assert len(workers_below(os.getpid(), "Relay")) == RELAYS[name]
        two = run.finish(900)
    finally:
        run.end()
    assert run.text.count("a new worker replaces it") == len(victims), run.text
    # The killed relay's copies may stay until the next run; nobody else's do.
    assert len(abandoned() - before) <= RELAYS[name]
    (first,) = stable_metrics(one)
    rows = read_metrics(two / "metrics.jsonl")
    assert {name: rows[0][name] for name in first} == pytest.approx(first, rel=1e-5, abs=1e-5)
    # On-policy: with other weights than the trainer's an engine would say other log-probs.
    assert max(row["training/rollout_logp_diff_mean"] for row in rows) < 1e-4
    assert {row["rollout/staleness/max"] for row in rows} == {0.0}
    rewards = [row["critic/rewards/mean"] for row in rows]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2
