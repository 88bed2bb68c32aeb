"""What goes through the controller: as many bytes for long responses as for short ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import controller
import numpy as np
import pytest
from online_runs import online_recipe
from ray import cloudpickle

from isotrain.cluster.connect import join_cluster
from isotrain.cluster.objects import Handle, fetch
from isotrain.cluster.replaceable import Replaceable, Startable
from isotrain.cluster.workers import Member, Stream, WorkerCall, WorkerGroup
from isotrain.data.trajectory import Trajectory
from isotrain.device.detect import choose_device
from isotrain.recipe.load import resolved
from isotrain.recipe.online import ClusterSection
from isotrain.rewards.function import read_source
from isotrain.rollout.base import More, Request, Sampling, no_more
from isotrain.trainers.build import TRAIN, open_prompts
from isotrain.trainers.online.engine_loop import EngineLoop
from isotrain.trainers.online.messages import Group, PromptRequest, Responses, Score, plan_step
from isotrain.trainers.online.reward_worker import RewardWorker
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.trainers.online.rollouts import Collector, RolloutProgress

pytestmark = pytest.mark.ray

PROMPTS, N, RANKS = 8, 4, 2
SHORT, LONG = 128, 8192
BUDGET = 16384
SHOWN: list[str] = []


class LongWinded:
    """In the place of an engine: as many tokens as it is asked for at most, of one kind."""

    at_once = 64

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: More = no_more
    ) -> Iterator[Trajectory]:
        length = sampling.max_tokens
        for request in requests:
            yield Trajectory(
                row=request.row,
                prompt_index=request.prompt_index,
                sample=request.sample,
                seed=request.seed,
                prompt_length=len(request.prompt_P),
                tokens_T=np.concatenate([request.prompt_P, np.full(length, 20, np.int32)]),
                mask_N=np.ones(length, np.bool_),
                logp_N=np.full(length, -1.0, np.float32),
                version_N=np.zeros(length, np.int32),
                finished=True,
            )


class LongWindedWorker(RolloutWorker):
    """The rollout worker itself, but for its engine."""

    def start(self) -> None:
        self.stores = open_prompts(self.recipe)
        self.loop = EngineLoop(LongWinded)  # type: ignore[arg-type]


class Counting(WorkerGroup[Any]):
    """Adds up the size of all that this process sends to workers and gets from them."""

    sent = received = 0

    def submit_to(self, index: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> WorkerCall[Any]:
        self.sent += size((args, kwargs))
        return super().submit_to(index, method, *args, **kwargs)

    def stream(self, index: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Stream[Any]:
        self.sent += size((args, kwargs))
        return super().stream(index, method, *args, **kwargs)

    def results(self, calls: Sequence[WorkerCall[Any]], timeout: float | None = None) -> list[Any]:
        values = super().results(calls, timeout)
        self.received += sum(size(value) for value in values)
        return values


def size(value: Any) -> int:
    return len(cloudpickle.dumps(value))


def started(worker: type[Startable], *args: Any) -> Counting:
    group = Counting(worker.__name__, worker, [Member(args)])
    group.call(worker.start)
    return group


@pytest.fixture(scope="module")
def collector(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    values = resolved(online_recipe(tiny, tmp_path_factory.mktemp("run")))
    here = sys.modules[__name__]
    # Workers cannot import this file: they get the class itself.
    cloudpickle.register_pickle_by_value(here)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with (
            join_cluster(ClusterSection(address="local"), choose_device("cpu")),
            ThreadPoolExecutor() as pool,
        ):
            # At the same time: each takes seconds to import what it needs.
            writing = pool.submit(started, LongWindedWorker, values, "engine 0")
            source = read_source(f"{tiny / 'reward.py'}:score")
            scoring = pool.submit(started, RewardWorker, values, source)
            with writing.result() as engines, scoring.result() as rewards:
                yield Collector(
                    controller.engines_without_weights(engines),
                    Replaceable(rewards, 60.0, print),
                    RolloutProgress(SHOWN.append, print),
                )
    cloudpickle.unregister_pickle_by_value(here)


def bytes_per_trajectory(collector: Collector, length: int) -> dict[str, float]:
    """Of one step: what comes in with responses and scores, and what goes out for them.

    One draw at a time, because how many share a message depends on the moment.
    """
    engines, rewards = collector.engines.group, collector.rewards.group
    assert isinstance(engines, Counting) and isinstance(rewards, Counting)
    for group in (engines, rewards):
        group.sent = group.received = 0
    groups = [
        collector.collect(TRAIN, [PromptRequest(prompt_index, prompt_index)], N, Sampling(length))[0][0]
        for prompt_index in range(PROMPTS)
    ]
    told = {
        "responses": engines.received,
        "scores": rewards.received,
        "requests": engines.sent + rewards.sent,
    }
    plan = plan_step(groups, PROMPTS, BUDGET, RANKS, share_prompts=True)
    told["plans"] = sum(size(part) for part in plan.ranks)
    values = [score.value for group in groups for score in group.scores]
    told["values"] = sum(size(part) for part in plan.split(values))
    lengths = [len(t.response_N) for group in fetch([g.handle for g in groups]) for t in group]
    assert lengths == [length] * PROMPTS * N
    return {name: total / (PROMPTS * N) for name, total in told.items()}


def test_how_far_the_responses_are_is_shown(collector: Collector) -> None:
    SHOWN.clear()
    collector.collect(
        TRAIN,
        [PromptRequest(prompt_index, prompt_index) for prompt_index in range(PROMPTS)],
        N,
        Sampling(SHORT),
    )
    assert SHOWN[0] == f"responses 0 of {PROMPTS * N}, 0 scored, 0 s" and SHOWN[-1] == ""
    assert any(text.startswith(f"responses {PROMPTS * N} of {PROMPTS * N}, ") for text in SHOWN)


def test_bytes_do_not_depend_on_lengths(collector: Collector) -> None:
    short, long = (bytes_per_trajectory(collector, length) for length in (SHORT, LONG))
    print(f"bytes a trajectory: {short} with {SHORT} tokens, {long} with {LONG}")
    # A group of short responses goes to one rank as a whole; at worst each response goes to another one.
    assert short.pop("plans") < 120 and long.pop("plans") < 120
    # A larger number takes a byte or two more.
    for name in short:
        assert long[name] == pytest.approx(short[name], abs=8), name
    assert sum(long.values()) < 600


def test_the_benchmark_does_what_the_loop_does() -> None:
    """Without workers: the parts that it measures are the loop's own, and change with them."""
    right, wrong = Score(1.0, {}, None, ""), Score(0.0, {}, None, "")
    groups = [
        Group(
            Responses(prompt_index, prompt_index, 20, (5, 7), (5, 7), (True, True), 0, 0.0),
            Handle(prompt_index),
            (right, wrong),
            "data",
        )
        for prompt_index in range(8)
    ]
    measured = controller.Controller(controller.Step(prompts=8, n=2, ranks=2))
    times, sizes = measured.work(groups)
    assert {"plan", "scores", "advantages", "metrics"} < set(times)
    assert all(size > 0 for size in sizes.values())
    assert measured.ranks_a_group >= 1
