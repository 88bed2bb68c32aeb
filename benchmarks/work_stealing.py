"""What one queue of prompts gains over an equal split, on lengths that differ from prompt to prompt.

The real collector, queue and rollout workers; engines that only keep time, as if each had a device of its
own: a step takes `--step-ms` and gives one token to each of at most `--at-once` responses. Lengths are
lognormal by prompt: the responses to a hard prompt are all long. Both ways alternate on the same lengths.
The first engine takes `--slow` times as long for a step as the others. `ratio` is the time with the split
over the time with the queue. Higher is better.

    python benchmarks/work_stealing.py [--turns 5] [--engines 8] [--prompts 256] [--responses 4]
                                       [--at-once 32] [--step-ms 10] [--slow 1]
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import bench
import numpy as np
from controller import Scorer, engines_without_weights
from ray import cloudpickle

from isotrain.cluster.connect import join_cluster
from isotrain.cluster.replaceable import Replaceable
from isotrain.cluster.workers import Member, WorkerGroup
from isotrain.data.trajectory import Trajectory
from isotrain.device.detect import choose_device
from isotrain.recipe.online import ClusterSection
from isotrain.rollout.base import More, Request, Sampling, no_more, trajectory_of
from isotrain.trainers.build import TRAIN
from isotrain.trainers.online.engine_loop import EngineLoop
from isotrain.trainers.online.messages import PromptRequest
from isotrain.trainers.online.prompt_queue import PromptQueue
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.trainers.online.rollouts import Collector, RolloutProgress

LONGEST = 400
GOAL = 1.05
# Nothing of it is read but the seed.
RECIPE = {
    "name": "work-stealing",
    "output": "nowhere",
    "model": {"path": "no model"},
    "data": {"train": "no rows", "max_length": 8, "batch_size": 1},
    "algorithm": {"name": "grpo"},
    "rollout": {"engine": "hf", "n": 2, "max_tokens": LONGEST},
    "reward": {"gsm8k": {}},
    "seed": 1,
}


def length(request: Request) -> int:
    of_prompt = random.Random(request.prompt_index).lognormvariate(3.5, 0.8)
    return max(1, min(LONGEST, int(of_prompt * random.Random(request.seed).uniform(0.8, 1.2))))


class Clock:
    """An engine that keeps time."""

    def __init__(self, at_once: int, step_seconds: float) -> None:
        self.at_once, self.step_seconds, self.version = at_once, step_seconds, 0

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: More = no_more
    ) -> Iterator[Trajectory]:
        waiting, running, now = list(requests), list[tuple[int, Request]](), 0
        while True:
            waiting += more()
            while waiting and len(running) < self.at_once:
                request = waiting.pop(0)
                running.append((now + length(request), request))
            if not running:
                return
            now += 1
            time.sleep(self.step_seconds)
            for end, request in [one for one in running if one[0] <= now]:
                running.remove((end, request))
                nothing_N = np.zeros(1, np.int32)
                yield trajectory_of(request, nothing_N, nothing_N.astype(np.float32), 0, True)


class ClockWorker(RolloutWorker):
    """The rollout worker itself, but for its engine and its prompts."""

    def __init__(self, at_once: int, step_seconds: float) -> None:
        super().__init__(RECIPE, "engine")
        engine: Any = Clock(at_once, step_seconds)
        self.loop = EngineLoop(lambda: engine)
        self.stores: Any = {TRAIN: _Prompts()}


class _Prompts:
    def __getitem__(self, row: int) -> Any:
        return SimpleNamespace(tokens_P=np.ones(4, np.int32))


def main() -> None:
    parser = bench.Options(__doc__, turns=1, prompts=64, engines=2, slow=2.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--responses", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--slow", type=float, default=1.0)
    options = parser.read()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    cloudpickle.register_pickle_by_value(sys.modules["controller"])  # type: ignore[no-untyped-call]
    with ExitStack() as stack:
        stack.enter_context(join_cluster(ClusterSection(address="local"), choose_device("cpu")))
        speeds = [options.slow] + [1.0] * (options.engines - 1)
        members = [Member((options.at_once, speed * options.step_ms / 1e3)) for speed in speeds]
        engines: Any = stack.enter_context(WorkerGroup("engine", ClockWorker, members))
        scorers: Any = stack.enter_context(WorkerGroup("scorer", Scorer, [Member((options.responses,))]))
        queue = stack.enter_context(WorkerGroup("queue", PromptQueue, [Member()]))
        split = Collector(
            engines_without_weights(engines),
            Replaceable(scorers, 60.0, print),
            RolloutProgress(lambda text: None, print),
        )
        stealing = replace(split, queue=Replaceable(queue, 60.0, print))
        seconds: dict[str, list[float]] = {"split": [], "queue": []}
        for turn in range(options.turns):
            first = turn * options.prompts
            prompts = [PromptRequest(first + i, i) for i in range(options.prompts)]
            for name, collector in (("split", split), ("queue", stealing)):
                begun = time.perf_counter()
                groups, _ = collector.collect(TRAIN, prompts, options.responses, Sampling(LONGEST))
                seconds[name].append(time.perf_counter() - begun)
                assert [group.responses.prompt_index for group in groups] == [p.prompt_index for p in prompts]
            ratios = [a / b for a, b in zip(seconds["split"], seconds["queue"], strict=True)]
            bench.report(
                "work_stealing",
                median := bench.spread(ratios)["median"],
                goal=GOAL,
                met=median >= GOAL,
                ratios=bench.spread(ratios),
                seconds={name: bench.spread(values) for name, values in seconds.items()},
                engines=options.engines,
                prompts=options.prompts,
                responses=options.responses,
                at_once=options.at_once,
                slow=options.slow,
            )


if __name__ == "__main__":
    main()
