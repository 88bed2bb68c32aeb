"""An online run's workers as plain objects of one process: without Ray, and without its start-up time.

What is computed is the same: the workers know nothing of Ray. One rank, one engine, one reward worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


class _Box:
    """A value in the place of one in Ray's object store."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _get(boxes: Sequence[_Box]) -> list[Any]:
    return [box.value for box in boxes]


class _Watch:
    """Everything is there at once: a call has run before anybody waits for it."""

    def wait(self, refs: Sequence[Any], deadline: float | None = None, **_: Any) -> list[Any]:
        return list(refs)


class Group:
    """The part of `cluster.workers.WorkerGroup` that online training uses."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = workers
        self.watch = _Watch()
        self.closed = False
        self.locations = [SimpleNamespace(host="here", pid=0) for _ in workers]
        self.before_end: Any = None

    def __len__(self) -> int:
        return len(self.workers)

    def submit_to(self, index: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from isotrain.cluster.workers import WorkerCall

        done: Any = _Box(getattr(self.workers[index], method.__name__)(*args, **kwargs))
        return WorkerCall(index, method.__name__, done)

    def within(self, timeout: float | None) -> Group:
        return self

    def submit(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [self.submit_to(index, method, *args, **kwargs) for index in range(len(self))]

    def results(self, calls: Sequence[Any], timeout: float | None = None) -> list[Any]:
        return [call.ref.value for call in calls]

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return self.results(self.submit(method, *args, **kwargs))

    def call_each(self, method: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        return [self.call_on(index, method, own) for index, own in enumerate(args)]

    def call_on(self, index: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.submit_to(index, method, *args, **kwargs).ref.value

    def stream(self, index: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from isotrain.cluster.workers import Stream

        items: Any = map(_Box, getattr(self.workers[index], method.__name__)(*args, **kwargs))
        return Stream(index, method.__name__, items)

    def close(self) -> None:
        for worker in self.workers:
            if hasattr(worker, "close"):
                worker.close()


@contextmanager
def assemble(
    recipe: Any, cluster: Any, reward_source: str | None, tell: Callable[[str], None]
) -> Iterator[Any]:
    """As `trainers.online.worker_groups.assemble`, in this process."""
    from isotrain.device.detect import choose_device
    from isotrain.recipe.load import resolved
    from isotrain.trainers.online.policy_rank import PolicyRank
    from isotrain.trainers.online.reward_worker import RewardWorker
    from isotrain.trainers.online.rollout_worker import RolloutWorker
    from isotrain.trainers.online.worker_groups import WorkerGroups
    from isotrain.weights.update import Routes

    device, values = choose_device(recipe.device.type), resolved(recipe)
    values["device"]["type"] = device.type
    generates = recipe.rollout.generates
    ranks: Any = Group([PolicyRank(values)])
    engines: Any = Group([RolloutWorker(values, "rollout engine 0")] if generates else [])
    rewards: Any = Group([RewardWorker(values, reward_source)] if generates else [])
    nobody: Any = Group([])
    routes = Routes("file", ((0,),) * len(engines), (len(engines),), ("",))
    try:
        yield WorkerGroups(device, ranks, (None, None), engines, nobody, rewards, nobody, False, [routes])
    finally:
        for group in (rewards, engines, ranks):
            group.close()


def use_inline_workers() -> None:
    """For this process, for good."""
    import ray

    from isotrain.cluster import objects
    from isotrain.trainers.online import run

    changed: Any = objects
    starter: Any = run
    store: Any = SimpleNamespace(put=_Box, get=_get, exceptions=ray.exceptions)
    changed.ray = store
    starter.assemble = assemble
