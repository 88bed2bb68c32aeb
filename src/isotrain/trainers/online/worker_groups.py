"""The workers of an online run, each in its place in the cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.cluster.background import in_background
from isotrain.cluster.connect import join_cluster, resource_counts
from isotrain.cluster.placement import (
    Demand,
    device_of,
    engine_environments,
    helper_environment,
    place,
    rank_environments,
)
from isotrain.cluster.replaceable import Replaceable
from isotrain.cluster.workers import Member, W, Watch, WorkerGroup
from isotrain.device.base import Device
from isotrain.device.detect import find_device
from isotrain.observe.environment import numerics
from isotrain.recipe.load import resolved
from isotrain.recipe.online import ClusterSection
from isotrain.recipe.schema import Recipe
from isotrain.rollout.relay import Relay
from isotrain.trainers.online.policy_rank import Description, PolicyRank
from isotrain.trainers.online.reward_worker import RewardWorker
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.trainers.online.rollouts import CALLS_AT_ONCE
from isotrain.trainers.online.weights import Relays, engine_name, relay_members, relay_of_engines

# A checkpoint that is being written when the run ends is finished first.
CLOSING_SECONDS = 120.0


@dataclass(frozen=True)
class WorkerGroups:
    device: Device
    ranks: WorkerGroup[PolicyRank]
    store: tuple[str | None, str | None]
    """Where the ranks meet: a host to listen on, or none and a directory for a file."""
    engines: WorkerGroup[RolloutWorker]
    relays: Relays
    rewards: WorkerGroup[RewardWorker]
    colocated: bool
    """Whether ranks and engines use the same device memory one after the other."""

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
            return described, next(iter(self.engines.results(generating, timeout)), {})
        self.ranks.call(PolicyRank.offload)
        settings = self.engines.within(timeout).call(RolloutWorker.start)[0]
        self.engines.call(RolloutWorker.sleep)
        self.ranks.call(PolicyRank.onload)
        return described, settings


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
    recipe: Recipe, cluster: ClusterSection, reward_source: str | None, tell: Callable[[str], None]
) -> Iterator[WorkerGroups]:
    """All workers as processes with nothing loaded yet, ended with the block."""
    assert recipe.rollout is not None and recipe.reward is not None
    rollout, values = recipe.rollout, resolved(recipe)
    scorer_count = recipe.reward.workers if rollout.generates else 0
    options: dict[str, Any] = {"start_timeout": cluster.start_timeout, "watch": Watch()}
    with ExitStack() as stack:

        def group(name: str, worker: type[W], members: list[Member], **own: Any) -> WorkerGroup[W]:
            return stack.enter_context(WorkerGroup(name, worker, members, **options, **own))

        here = find_device(recipe.device.type)
        joined = stack.enter_context(
            join_cluster(cluster, here, keep_logs=Path(recipe.output).absolute() / "logs")
        )
        tell(joined.introduction)
        device = device_of(joined, recipe.device.type)
        # Decided once: workers elsewhere may see other devices than this process.
        values["device"]["type"] = device.type
        demand = demand_of(recipe, cluster, _engine_count(recipe, cluster, device))
        placement = stack.enter_context(place(joined, device, demand, cluster.start_timeout, tell))
        at_once = rollout.staleness > 0  # otherwise ranks and engines wait for each other
        beside = (placement.engines, placement.ranks) if at_once else ((), ())
        determinism, common = recipe.device.determinism, _passed_on(device)
        of_ranks = rank_environments(placement.ranks, device, determinism, beside[0])
        of_engines = engine_environments(placement.engines, device, determinism, beside[1])
        learners = [
            Member((values,), common | own, seat) for own, seat in zip(of_ranks, placement.ranks, strict=True)
        ]
        writers = [
            Member((values, engine_name(index)), common | own, seat)
            for index, (own, seat) in enumerate(zip(of_engines, placement.engines, strict=True))
        ]
        scorer = Member((values, reward_source), helper_environment(device))
        away = relay_members(placement, rollout.update_timeout)
        # At the same time: each process takes seconds to import what it needs.
        ranks = in_background(
            lambda: group("training rank", PolicyRank, learners, spmd=True, closing=CLOSING_SECONDS)
        )
        engines = in_background(lambda: group("rollout engine", RolloutWorker, writers))
        scorers = [scorer] * scorer_count
        rewards = in_background(
            lambda: group("reward worker", RewardWorker, scorers, concurrency=CALLS_AT_ONCE)
        )
        relay_group = in_background(lambda: group("weight relay", Relay, away))
        _raise_first_error(ranks, engines, rewards, relay_group)
        relays = Relays(
            ranks.result(),
            Replaceable(relay_group.result(), cluster.start_timeout, tell),
            relay_of_engines(placement),
            placement.ranks[0].host,
            rollout.update_timeout,
        )
        # The directory of a private cluster is removed with it.
        directory = str(joined.logs.parent) if joined.private else None
        colocated = rollout.generates and demand.colocated and cluster.offload and device.type != "cpu"
        meeting = (placement.store_host, directory)
        yield WorkerGroups(
            device, ranks.result(), meeting, engines.result(), relays, rewards.result(), colocated
        )


def _raise_first_error(*starting: Future[Any]) -> None:
    """When one has failed, or the user has had enough, the slowest is not waited for."""
    for future in wait(starting, return_when=FIRST_EXCEPTION).done:
        future.result()


def _passed_on(device: Device) -> dict[str, str]:
    """What the user has set that changes numbers: a joined cluster has the variables of `ray start`."""
    hides = device.visible_devices_variable
    found = numerics(os.environ, device.numerics_variables)
    return {name: value for name, value in found.items() if name != hides}
