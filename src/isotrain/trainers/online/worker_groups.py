"""The workers of an online run, each in its place in the cluster."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isotrain.children import in_background
from isotrain.cluster.connect import join_cluster, resource_counts
from isotrain.cluster.cores import cores_by_machine
from isotrain.cluster.placement import (
    Demand,
    Placement,
    device_of,
    engine_environments,
    helper_environment,
    place,
    rank_environments,
)
from isotrain.cluster.private import SHARED_MEMORY
from isotrain.cluster.waiting import Watch
from isotrain.cluster.workers import Member, W, WorkerGroup
from isotrain.device.base import Device
from isotrain.device.detect import find_device
from isotrain.observe.environment import numerics
from isotrain.recipe.load import resolved
from isotrain.recipe.online import ClusterSection
from isotrain.recipe.schema import Recipe
from isotrain.trainers.online.engines import engine_name
from isotrain.trainers.online.policy_rank import Description, PolicyRank
from isotrain.trainers.online.precheck import UserFiles
from isotrain.trainers.online.prompt_queue import PromptQueue
from isotrain.trainers.online.reward_worker import RewardWorker
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.trainers.online.rollouts import CALLS_AT_ONCE
from isotrain.trainers.online.weight_sync import possible_routes
from isotrain.trainers.preemption import Preempted
from isotrain.weights.file import RUN_VARIABLE, Relay, machines_without_ranks, remove_abandoned
from isotrain.weights.update import Routes

# A checkpoint that is being written when the run ends is finished first.
CLOSING_SECONDS = 120.0
# Calls to an engine in flight besides batches: validation, lost groups again, an update, and short ones.
OTHER_CALLS = 5


@dataclass(frozen=True)
class WorkerGroups:
    device: Device
    ranks: WorkerGroup[PolicyRank]
    store: tuple[str | None, str | None]
    """Where the ranks meet: a host to listen on, or none and a directory for a file."""
    engines: WorkerGroup[RolloutWorker]
    relays: WorkerGroup[Relay]
    """One on each machine that has engines but no rank."""
    rewards: WorkerGroup[RewardWorker]
    queue: WorkerGroup[PromptQueue]
    """One, or none where each engine gets an equal part of the prompts."""
    colocated: bool
    """Whether ranks and engines use the same device memory one after the other."""
    routes: Sequence[Routes]
    """Routes of the weights: best first, and the last works everywhere."""

    def start(self, timeout: float) -> tuple[Sequence[Description], dict[str, str]]:
        """Load all models; returns the ranks' descriptions and the engines' settings.

        At the same time unless they are colocated: an engine measures how much memory is free for it.
        """
        scoring = self.rewards.submit(RewardWorker.start)
        generating = [] if self.colocated else self.engines.submit(RolloutWorker.start)
        store = self.ranks.call_on(0, PolicyRank.open_store, *self.store)
        learning = self.ranks.submit(PolicyRank.start, store)
        # Fast ones first: a mistake in a reward file is reported before any model has loaded.
        self.rewards.results(scoring, timeout)
        described = self.ranks.results(learning, timeout)
        if not self.colocated:
            return described, self._settings(self.engines.results(generating, timeout))
        self.ranks.call(PolicyRank.offload)
        settings = self._settings(self.engines.within(timeout).call(RolloutWorker.start))
        self.engines.call(RolloutWorker.sleep)
        self.ranks.call(PolicyRank.onload)
        return described, settings

    def _settings(self, of_engines: Sequence[dict[str, str]]) -> dict[str, str]:
        """Those of the first engine, with the cores to which each of them is bound."""
        cores = [settings.get("cores", "") for settings in of_engines]
        text = cores_by_machine(cores, [where.node for where in self.engines.locations])
        return {**next(iter(of_engines), {}), **({"cores": text} if text else {})}


def demand_of(recipe: Recipe, cluster: ClusterSection, engines: int | None = None) -> Demand:
    """Which devices ranks and engines take; `engines` as there are, once that is known."""
    rollout, ranks = recipe.rollout, recipe.device.ranks
    assert rollout is not None
    if engines is None:
        engines = rollout.engine_count(ranks, cluster.placement) if rollout.generates else 0
    return Demand(ranks, engines, rollout.tensor_parallel, cluster.placement == "colocated")


def _engine_count(recipe: Recipe, cluster: ClusterSection, device: Device) -> int:
    """With engines for the devices that nobody else uses. Cores are no such devices: engines share them."""
    rollout, ranks = recipe.rollout, recipe.device.ranks
    assert rollout is not None
    if not rollout.generates:
        return 0
    free = 0 if device.type == "cpu" else int(resource_counts(device.ray_resource)[1]) - ranks
    return rollout.engine_count(ranks, cluster.placement, free)


@contextmanager
def assemble(
    recipe: Recipe,
    cluster: ClusterSection,
    files: UserFiles,
    tell: Callable[[str], None],
    is_ending: Callable[[], bool] = lambda: False,
) -> Iterator[WorkerGroups]:
    """All workers as processes with nothing loaded yet, ended with the block."""
    assert recipe.rollout is not None and recipe.reward is not None
    rollout, values = recipe.rollout, resolved(recipe)
    scorer_count = recipe.reward.workers if rollout.generates else 0
    options: dict[str, Any] = {"start_timeout": cluster.start_timeout, "watch": Watch()}
    with ExitStack() as stack:
        run = f"{secrets.token_hex(4)}-"
        stack.push(partial(_remove_shared_memory, run))

        def group(name: str, worker: type[W], members: list[Member], **group_options: Any) -> WorkerGroup[W]:
            return stack.enter_context(WorkerGroup(name, worker, members, **options, **group_options))

        here = find_device(recipe.device.type)
        keep_logs = Path(recipe.output).absolute() / "logs"
        joined = stack.enter_context(
            join_cluster(cluster, here, ranks=recipe.device.ranks, keep_logs=keep_logs, is_ending=is_ending)
        )
        tell(joined.introduction)
        device = device_of(joined, recipe.device.type)
        # Decided once: workers elsewhere may see other devices than this process.
        values["device"]["type"] = device.type
        demand = demand_of(recipe, cluster, _engine_count(recipe, cluster, device))
        placement = stack.enter_context(place(joined, device, demand, cluster.start_timeout, tell))
        common = {**_passed_on(device), RUN_VARIABLE: run}
        learners, writers = _members(values, rollout.staleness, device, placement, common, files.episodes)
        scorer = Member((values, files.reward), helper_environment(device))
        away = [
            Member((f"weight relay {number}",), {RUN_VARIABLE: run}, slot)
            for number, slot in enumerate(machines_without_ranks(placement).values())
        ]
        # At the same time: each process takes seconds to import what it needs.
        ranks = in_background(
            lambda: group("training rank", PolicyRank, learners, spmd=True, closing=CLOSING_SECONDS)
        )
        batches = rollout.staleness + 1 if rollout.in_flight else 1  # that workers have at a time
        calls = batches + OTHER_CALLS if rollout.in_flight else 1
        # Weights come beside what engines generate.
        engines = in_background(
            lambda: group("rollout engine", RolloutWorker, writers, concurrency=calls, beside=True)
        )
        scorers = [scorer] * scorer_count
        rewards = in_background(
            lambda: group("reward worker", RewardWorker, scorers, concurrency=batches * CALLS_AT_ONCE)
        )
        relays = in_background(lambda: group("weight relay", Relay, away))
        # Who writes which response would depend on the moment, and with it, in some kernels, the last digit.
        shared = len(writers) > 1 and recipe.device.determinism == "off"
        queues = [Member((), helper_environment(device))] * shared
        queue = in_background(lambda: group("prompt queue", PromptQueue, queues))
        _raise_first_error(ranks, engines, rewards, relays, queue)
        # The directory of a private cluster is removed with it.
        directory = str(joined.logs.parent) if joined.private else None
        colocated = rollout.generates and demand.colocated and cluster.offload and device.type != "cpu"
        meeting = (placement.store_host, directory)
        others = (rewards.result(), relays.result(), queue.result(), ranks.result())
        stack.push(_ending_at_once(engines.result(), *others))
        yield WorkerGroups(
            device,
            ranks.result(),
            meeting,
            engines.result(),
            relays.result(),
            rewards.result(),
            queue.result(),
            colocated,
            possible_routes(placement, rollout.tensor_parallel, together=_goes_by_device(recipe, device)),
        )


def _members(
    values: dict[str, Any],
    staleness: int,
    device: Device,
    placement: Placement,
    common: dict[str, str],
    episodes: str | None,
) -> tuple[list[Member], list[Member]]:
    """Training ranks and engines; `common` are variables of all.

    `episodes` is the text of the file of the environment or agent.
    """
    # On-policy, ranks and engines wait for each other.
    beside = (placement.engines, placement.ranks) if staleness else ((), ())
    determinism = values["device"]["determinism"]
    of_ranks = rank_environments(placement.ranks, device, determinism, beside[0])
    of_engines = engine_environments(placement.engines, device, determinism, beside[1])
    learners = [
        Member((values,), common | environment, slot)
        for environment, slot in zip(of_ranks, placement.ranks, strict=True)
    ]
    writers = [
        Member((values, engine_name(index), episodes), common | environment, slot)
        for index, (environment, slot) in enumerate(zip(of_engines, placement.engines, strict=True))
    ]
    return learners, writers


def _goes_by_device(recipe: Recipe, device: Device) -> bool:
    """Whether weights go from device to device."""
    assert recipe.rollout is not None
    return recipe.rollout.takes_from_devices and device.type != "cpu"


def _raise_first_error(*starting: Future[Any]) -> None:
    """When one has failed, or the user has had enough, the slowest is not waited for."""
    for future in wait(starting, return_when=FIRST_EXCEPTION).done:
        future.result()


def _ending_at_once(engines: WorkerGroup[Any], *others: WorkerGroup[Any]) -> Callable[..., None]:
    """The first exit of a block: in a run that is preempted, closing must not wait for busy workers.

    With time left, that is for engines: relays and reward workers have to remove what only they can.
    """

    def leave(_: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, SystemExit):
            for group in (engines, *others) if _is_overdue(error) else (engines,):
                group.close()

    return leave


def _is_overdue(error: BaseException | None) -> bool:
    """Ray raises a plain SystemExit in place of the one that interrupts its waiting."""
    return isinstance(error, SystemExit) and (not isinstance(error, Preempted) or error.overdue)


def _remove_shared_memory(run: str, _: object, error: BaseException | None, __: object) -> None:
    """The last exit of a block: workers that were killed did not remove theirs, and may still be ending."""
    deadline = time.monotonic() + (1.0 if _is_overdue(error) else 0.0)
    remove_abandoned(SHARED_MEMORY, 0.0, run)
    while time.monotonic() < deadline:
        time.sleep(0.1)
        remove_abandoned(SHARED_MEMORY, 0.0, run)


def _passed_on(device: Device) -> dict[str, str]:
    """The user's variables that change numerics: a joined cluster has those of `ray start`."""
    hides = device.visible_devices_variable
    variables = numerics(os.environ, device.numerics_variables)
    return {name: value for name, value in variables.items() if name != hides}
