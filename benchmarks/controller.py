"""What a step costs the controller: 16,384 trajectories against 2,048, by part. Lower is better.

A step of GRPO with 1,024 prompts x 16 responses for 64 ranks, and an eighth of both. Groups come through the
real collector from workers that make up lengths and scores and do nothing else; then the controller's own
work on them is measured part by part, and the size of all messages. `ratio` is the processor time of a
trajectory in the large step over that in the small one: 1 means that the controller's work grows with nothing
but the number of trajectories. `seconds` is the controller's work in the large step, all of its threads
together. `ranks_a_group` says how many ranks fetch the responses to one prompt, on average.

`calls` is what a call to all ranks costs besides what the ranks do: measured with 2 and with `--actors`
workers that do nothing, and from that, by a straight line, what it would be with 1,024.

    python benchmarks/controller.py [--turns 5] [--prompts 1024] [--responses 16] [--ranks 64] [--actors 8]
                                    [--profile]
"""

from __future__ import annotations

import cProfile
import os
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import bench
import numpy as np
from ray import cloudpickle

from isotrain.cluster.connect import join_cluster
from isotrain.cluster.objects import Handle, put
from isotrain.cluster.replaceable import Replaceable
from isotrain.cluster.workers import Member, WorkerGroup
from isotrain.device.detect import choose_device
from isotrain.recipe.online import ClusterSection, GrpoSection
from isotrain.rollout.base import Sampling
from isotrain.trainers.online.build_rank import advantage_settings
from isotrain.trainers.online.loop import OnlineTrainer
from isotrain.trainers.online.messages import Group, PromptRequest, Responses, Score, StepPlan, plan_step
from isotrain.trainers.online.metrics import step_metrics
from isotrain.trainers.online.reward_worker import ScoredGroup
from isotrain.trainers.online.rollouts import Batch, Collector, RolloutProgress, Seconds, _informative
from isotrain.trainers.online.weights import Engines, Tolerance
from isotrain.trainers.setup import TRAIN

ENGINES, SCORERS = 4, 2
LONGEST, BUDGET = 8192, 16384
SMALLER = 8
GOAL = 1.5
FEW_ACTORS, MANY_RANKS = 2, 1024
CALLS = 200


class Engine:
    """Makes lengths up: most responses short, a few as long as is allowed."""

    def generate(
        self, store: str, prompt_requests: Sequence[PromptRequest], n: int, sampling: Sampling
    ) -> Iterator[tuple[Responses, Handle[int]]]:
        for prompt_index, row in prompt_requests:
            draw = random.Random(prompt_index)
            lengths = tuple(min(LONGEST, int(draw.lognormvariate(6.5, 0.8)) + 1) for _ in range(n))
            finished = tuple(length < LONGEST for length in lengths)
            yield (
                Responses(prompt_index, row, draw.randint(50, 300), lengths, lengths, finished, 0),
                put(prompt_index),
            )


class Scorer:
    def __init__(self, n: int) -> None:
        self.n = n

    def score(self, store: str, items: Sequence[tuple[int, Handle[int]]]) -> list[ScoredGroup]:
        return [("data", tuple(self._score(row, i) for i in range(self.n))) for row, _ in items]

    def _score(self, row: int, sample: int) -> Score:
        return Score(float(row % 3 == sample % 2), {}, None, "")


class Idle:
    """In the place of a training rank."""

    def nothing(self) -> None: ...


class Step(NamedTuple):
    prompts: int
    n: int
    ranks: int


class Spent(NamedTuple):
    wall: float
    processor: float


def spent(act: Callable[[], Any]) -> tuple[Any, Spent]:
    wall, processor = time.perf_counter(), time.process_time()
    result = act()
    return result, Spent(time.perf_counter() - wall, time.process_time() - processor)


def size(value: Any) -> int:
    return len(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


class Controller:
    """The parts of a step that need no worker's response, as the loop does them."""

    def __init__(self, step: Step) -> None:
        self.step = step
        estimation = advantage_settings(GrpoSection(name="grpo"))
        self.trainer: Any = SimpleNamespace(
            settings=SimpleNamespace(estimation=estimation, reward_models={}, failed_score=0.0),
            ranks=range(step.ranks),
            kl=SimpleNamespace(coefficient=0.0),
        )

    def work(self, groups: list[Group]) -> tuple[dict[str, Spent], dict[str, int]]:
        """Time of each part, and bytes of what comes in and goes out."""
        step, trainer, times = self.step, self.trainer, dict[str, Spent]()
        batch = Batch(groups, None, 0, Seconds(0.0, 0.0), 0)
        _, times["informative groups"] = spent(lambda: _informative(groups))
        plan: StepPlan
        plan, times["plan"] = spent(lambda: plan_step(groups, step.prompts, BUDGET, step.ranks, True))
        scored, times["scores"] = spent(lambda: OnlineTrainer._scores(trainer, groups))
        scores_R, failures, _ = scored
        told, times["advantages"] = spent(
            lambda: OnlineTrainer._advantages(trainer, batch, plan, scores_R, scores_R)
        )
        _, times["metrics"] = spent(lambda: step_metrics(groups, scores_R, scores_R, 1, failures))
        self.ranks_a_group = sum(len(part.groups) for part in plan.ranks) / len(groups)
        sizes = {
            "responses, in": sum(size((group.responses, group.handle)) for group in groups),
            "scores, in": sum(size((group.source, group.scores)) for group in groups),
        }
        sizes["plans, out"], times["plans to bytes"] = spent(lambda: sum(size(part) for part in plan.ranks))
        sizes["advantages, out"], times["advantages to bytes"] = spent(
            lambda: sum(size(part) for part in told)
        )
        return times, sizes


Times = dict[str, Spent]


def measure(collector: Collector, controller: Controller) -> tuple[Times, dict[str, int]]:
    """Of one turn: time of each part, and bytes of what comes in and goes out."""
    step = controller.step
    prompt_requests = [PromptRequest(prompt_index, prompt_index) for prompt_index in range(step.prompts)]
    (groups, _), collected = spent(
        lambda: collector.collect(TRAIN, prompt_requests, step.n, Sampling(LONGEST))
    )
    times, sizes = controller.work(groups)
    times = {"collect": collected, **times}
    total = sum(part.processor for part in times.values())
    print(f"{step.prompts * step.n} trajectories {total:.2f} s", file=sys.stderr, flush=True)
    return times, sizes


def call_cost(actors: int) -> Spent:
    """Of one call to a group of so many workers that do nothing: medians."""
    with WorkerGroup("rank", Idle, [Member()] * actors, spmd=True) as group:
        group.call(Idle.nothing)
        costs = [spent(lambda: group.call(Idle.nothing))[1] for _ in range(CALLS)]
    return Spent(
        statistics.median(cost.wall for cost in costs), statistics.mean(cost.processor for cost in costs)
    )


def calls_to_ranks(actors: int) -> dict[str, Any]:
    """What a call takes by itself and for each rank, in milliseconds; the last entry is not measured."""
    few, many = call_cost(FEW_ACTORS), call_cost(actors)
    a_rank = Spent(*((b - a) / (actors - FEW_ACTORS) for a, b in zip(few, many, strict=True)))

    def told(cost: Spent) -> dict[str, float]:
        return {name: round(1e3 * value, 3) for name, value in cost._asdict().items()}

    far = Spent(*(b + (MANY_RANKS - actors) * slope for b, slope in zip(many, a_rank, strict=True)))
    return {
        f"{FEW_ACTORS}_actors_ms": told(few),
        f"{actors}_actors_ms": told(many),
        "a_rank_ms": told(a_rank),
        f"extrapolated_{MANY_RANKS}_ranks_ms": told(far),
    }


def totals(all_times: Sequence[Times], step: Step) -> list[float]:
    """Microseconds of processor time for a trajectory, by turn."""
    trajectories = step.prompts * step.n
    return [1e6 * sum(part.processor for part in times.values()) / trajectories for times in all_times]


def engines_without_weights(group: WorkerGroup[Any]) -> Engines:
    """That are only asked for responses: nothing is sent to them, and nothing compared."""
    nothing_T, anything = np.zeros(1, np.int32), Tolerance(1.0, 1.0, 1.0)
    return Engines(group, 60.0, print, check_T=nothing_T, timeout=60.0, tolerance=anything)


def tell(
    controllers: tuple[Controller, Controller],
    few: Sequence[Times],
    many: Sequence[Times],
    sizes: Mapping[str, int],
    calls: Mapping[str, Any],
) -> None:
    small, large = (controller.step for controller in controllers)
    ratio = bench.spread([a / b for a, b in zip(totals(many, large), totals(few, small), strict=True)])
    trajectories = large.prompts * large.n
    bench.report(
        "controller",
        ratio["median"],
        goal=GOAL,
        met=ratio["median"] <= GOAL,
        ratios=ratio,
        trajectories=trajectories,
        ranks=large.ranks,
        ranks_a_group=round(controllers[1].ranks_a_group, 2),
        seconds=bench.spread([sum(part.processor for part in times.values()) for times in many]),
        parts_s={name: bench.spread([times[name].processor for times in many]) for name in many[0]},
        collect_wall_s=bench.spread([times["collect"].wall for times in many]),
        small_us_a_trajectory=bench.spread(totals(few, small)),
        bytes_a_trajectory={name: round(value / trajectories, 1) for name, value in sizes.items()},
        bytes=sum(sizes.values()),
        calls=calls,
    )


def main() -> None:
    parser = bench.Options(__doc__, turns=1, prompts=256, actors=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--actors", type=int, default=8, help="workers in place of ranks, more than 2")
    parser.add_argument("--profile", action="store_true", help="show the functions that take most time")
    options = parser.read()
    large = Step(options.prompts, options.responses, options.ranks)
    small = Step(options.prompts // SMALLER, options.responses, max(1, options.ranks // SMALLER))
    # Workers do not know this file.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    with ExitStack() as stack:
        stack.enter_context(join_cluster(ClusterSection(address="local"), choose_device("cpu")))
        engines = stack.enter_context(WorkerGroup("engine", Engine, [Member()] * ENGINES))
        scorers: WorkerGroup[Any] = stack.enter_context(
            WorkerGroup("scorer", Scorer, [Member((large.n,))] * SCORERS)
        )
        collector = Collector(
            engines_without_weights(engines),
            Replaceable(scorers, 60.0, print),
            RolloutProgress(lambda text: None, print),
        )
        controllers = Controller(small), Controller(large)
        few, many = list[Times](), list[Times]()
        calls = calls_to_ranks(options.actors)
        profile = cProfile.Profile()
        for turn in range(options.turns + 1):  # the first is left out
            less, _ = measure(collector, controllers[0])
            if options.profile:
                profile.enable()
            more, sizes = measure(collector, controllers[1])
            profile.disable()
            if turn:
                few.append(less)
                many.append(more)
                tell(controllers, few, many, sizes, calls)
    if options.profile:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
