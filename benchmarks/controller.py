"""What a step costs the controller: 16,384 trajectories against 2,048, by part. Lower is better.

A step of GRPO with 1,024 prompts x 16 responses for 64 ranks, and an eighth of both. Groups come through the
real collector from workers that make up lengths and scores and do nothing else; then the controller's own
work on them is measured part by part, and the size of all messages. `ratio` is the processor time of a
trajectory in the large step over that in the small one: 1 means that the controller's work grows with nothing
but the number of trajectories. `seconds` is the controller's work in the large step, all of its threads
together. `ranks_a_group` says how many ranks fetch the responses to one prompt, on average.

`calls` is what a call to all ranks costs besides what the ranks do, with workers that do nothing, in
milliseconds: through one agent for each 8 of them and, alternating, to each by itself. All of them run here,
so `wall` contains their work too; `processor` is the controller's own.

`step_s` is the controller's processor time of a step while ranks and engines wait for it. Its own work is
measured for each number of ranks. The three calls are measured with `--machines` x 8 workers; beyond that
they are extrapolated: as many agents as the controller would call, each at the measured price of one.
`collect` is not in it: groups are collected while others are being generated.

    python benchmarks/controller.py [--turns 5] [--prompts 1024] [--responses 16] [--ranks 64] [--machines 8]
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
from isotrain.cluster.node_proxy import teams
from isotrain.cluster.objects import Handle, put
from isotrain.cluster.replaceable import Replaceable
from isotrain.cluster.workers import Member, WorkerGroup
from isotrain.device.detect import choose_device
from isotrain.recipe.online import ClusterSection, GrpoSection
from isotrain.rollout.base import Sampling
from isotrain.trainers.build import TRAIN
from isotrain.trainers.online.build_rank import advantage_settings
from isotrain.trainers.online.engines import Engines
from isotrain.trainers.online.loop import OnlineTrainer
from isotrain.trainers.online.messages import Group, PromptRequest, Responses, Score, StepPlan, plan_step
from isotrain.trainers.online.metrics import step_metrics
from isotrain.trainers.online.prompt_queue import Draws
from isotrain.trainers.online.reward_worker import ScoredGroup
from isotrain.trainers.online.rollouts import Batch, Collector, RolloutProgress, Seconds, _informative
from isotrain.weights.check import Tolerance

ENGINES, SCORERS = 4, 2
LONGEST, BUDGET = 8192, 16384
SMALLER = 8
GOAL = 1.5
A_MACHINE, FEW_MACHINES = 8, 2
MORE_RANKS = (1024, 10240)
CALLS, CALLS_A_STEP = 50, 3


class Engine:
    """Makes lengths up: most responses short, a few as long as is allowed."""

    def generate(
        self,
        store: str,
        prompts: Sequence[PromptRequest] | Draws,
        n: int,
        sampling: Sampling,
        version: int = 0,
    ) -> Iterator[tuple[Responses, Handle[int]]]:
        assert not isinstance(prompts, Draws), "the collector has no queue"
        for prompt_index, row in prompts:
            draw = random.Random(prompt_index)
            lengths = tuple(min(LONGEST, int(draw.lognormvariate(6.5, 0.8)) + 1) for _ in range(n))
            finished = tuple(length < LONGEST for length in lengths)
            yield (
                Responses(prompt_index, row, draw.randint(50, 300), lengths, lengths, finished, 0, 0.0),
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
            estimation=estimation,
            reward=SimpleNamespace(reward_models={}, failed_score=0.0),
            ranks=range(step.ranks),
            _data_ranks=step.ranks,
            progress=SimpleNamespace(kl=SimpleNamespace(coefficient=0.0)),
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


def measure(collector: Collector, controller: Controller) -> tuple[Times, dict[str, int], list[Group]]:
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
    return times, sizes, groups


class Machines(WorkerGroup[Idle]):
    """Ranks as if each 8 had a machine of their own."""

    def _machines(self) -> list[list[int]]:
        return [list(range(first, first + A_MACHINE)) for first in range(0, len(self._members), A_MACHINE)]


def call_costs(machines: int) -> dict[str, Spent]:
    """Of one call to that many machines: alternating; medians, and means of processor time."""
    costs: dict[str, list[Spent]] = {"agents": [], "direct": []}
    with Machines("rank", Idle, [Member()] * (A_MACHINE * machines), spmd=True) as group:
        agents = group.proxies
        for turn in range(2 * CALLS + 2):
            way = "direct" if turn % 2 else "agents"
            group.proxies = None if turn % 2 else agents
            cost = spent(lambda: group.call(Idle.nothing))[1]
            if turn > 1:
                costs[way].append(cost)
        group.proxies = agents
    return {
        way: Spent(statistics.median(c.wall for c in all_of), statistics.mean(c.processor for c in all_of))
        for way, all_of in costs.items()
    }


def calls_to_ranks(machines: int) -> dict[str, Any]:
    """Milliseconds of a call, by ranks and way."""
    return {
        f"{count * A_MACHINE}_ranks": {
            way: {name: round(1e3 * value, 3) for name, value in cost._asdict().items()}
            for way, cost in call_costs(count).items()
        }
        for count in (FEW_MACHINES, machines)
    }


def agents_called(ranks: int) -> tuple[int, int]:
    """How many agents the controller calls, and how many ranks are the largest one's."""
    called = teams(ranks // A_MACHINE)
    return len(called), A_MACHINE * len(called[0])


def agent_ms(calls: Mapping[str, Any], machines: int) -> float:
    """Of the controller's processor for one call to one agent of 8 ranks."""
    few, many = (
        calls[f"{count * A_MACHINE}_ranks"]["agents"]["processor"] for count in (FEW_MACHINES, machines)
    )
    return float(many - few) / (machines - FEW_MACHINES)


def team_ms(ranks: int) -> float:
    """Measured: what arguments and replies of so many ranks add to a call to one agent."""
    args, replies = dict.fromkeys(range(ranks), ()), dict.fromkeys(range(ranks))
    times = [spent(lambda: (size(args), size(replies)))[1].processor for _ in range(20)]
    return 2e3 * statistics.median(times)  # taken apart as well as put together


def step_seconds(groups: list[Group], step: Step, calls: Mapping[str, Any], machines: int) -> dict[str, Any]:
    """What ranks and engines wait for in a step."""
    told = {}
    for ranks in sorted({machines * A_MACHINE, *MORE_RANKS}):
        times, _ = Controller(step._replace(ranks=ranks)).work(groups)
        own = sum(part.processor for name, part in times.items() if name != "informative groups")
        if ranks == machines * A_MACHINE:
            call = calls[f"{ranks}_ranks"]["agents"]["processor"]
        else:
            agents, of_one = agents_called(ranks)
            call = agents * (agent_ms(calls, machines) + team_ms(of_one))
        told[str(ranks)] = {
            "own_work": round(own, 3),
            "agents_called": agents_called(ranks)[0],
            "three_calls": round(CALLS_A_STEP * call / 1e3, 3),
            "total": round(own + CALLS_A_STEP * call / 1e3, 3),
            "calls": "measured" if ranks == machines * A_MACHINE else "extrapolated",
        }
    return told


def totals(all_times: Sequence[Times], step: Step) -> list[float]:
    """Microseconds of processor time for a trajectory, by turn."""
    trajectories = step.prompts * step.n
    return [1e6 * sum(part.processor for part in times.values()) / trajectories for times in all_times]


def engines_without_weights(group: WorkerGroup[Any]) -> Engines:
    """That are only asked for responses: nothing is sent to them, and nothing compared."""
    nothing, anything = [np.zeros(1, np.int32)], Tolerance.fixed(1.0)
    return Engines(group, 60.0, print, check_prompts=nothing, timeout=60.0, tolerance=anything)


def tell(
    controllers: tuple[Controller, Controller],
    few: Sequence[Times],
    many: Sequence[Times],
    sizes: Mapping[str, int],
    calls: Mapping[str, Any],
    steps: Mapping[str, Any],
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
        step_s=steps,
    )


def main() -> None:
    parser = bench.Options(__doc__, turns=1, prompts=256, machines=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--machines", type=int, default=8, help="of 8 workers each, more than 2")
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
        calls = calls_to_ranks(options.machines)
        profile = cProfile.Profile()
        for turn in range(options.turns + 1):  # the first is left out
            less, _, _ = measure(collector, controllers[0])
            if options.profile:
                profile.enable()
            more, sizes, groups = measure(collector, controllers[1])
            profile.disable()
            if turn:
                few.append(less)
                many.append(more)
                steps = step_seconds(groups, large, calls, options.machines)
                tell(controllers, few, many, sizes, calls, steps)
    if options.profile:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
