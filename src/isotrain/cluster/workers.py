"""Groups of workers: plain Python objects, each in a process of its own somewhere in the cluster.

A method is called by itself, `group.call(Worker.method, argument)`: so type checkers compare arguments and
results with it, and editors find it. W: class of the workers of a group.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from isotrain import hub
from isotrain.cluster.connect import ended_actors, living_nodes
from isotrain.cluster.failures import DEATHS, Overdue, WorkerDied, explain, overdue
from isotrain.cluster.host import Location, WorkerHost
from isotrain.cluster.node_proxy import LEEWAY, LedProxy, NodeProxy, machines_of, proxy_name, teams
from isotrain.cluster.placement import Slot
from isotrain.cluster.waiting import GRACE, Watch, cause_of, gather
from isotrain.errors import ClusterError, IsotrainError, WorkerLost

W = TypeVar("W")
P = ParamSpec("P")
Argument = TypeVar("Argument")
Result = TypeVar("Result")
Method = Callable[Concatenate[W, P], Result]

# Ray's name for the calls of a worker that do not wait for the others.
_BESIDE = "beside"


@dataclass(frozen=True)
class WorkerCall(Generic[Result]):
    """A method that one worker is running; `ref` is what Ray's own functions take."""

    index: int
    method: str
    ref: ObjectRef[Result]


@dataclass(frozen=True)
class Member:
    """Arguments, environment and place of one worker, to start it once or again."""

    args: tuple[Any, ...] = ()
    environment: Mapping[str, str] | None = None
    slot: Slot | None = None
    """Its place in the cluster; anywhere without."""


class WorkerGroup(Generic[W]):
    """Workers of one class, numbered from 0.

    The members of an SPMD group wait for each other in collectives: when one fails, or does not reply in
    time, all are ended. Members of other groups are independent, and can be restarted one by one.
    """

    def __init__(
        self,
        name: str,
        worker: type[W],
        members: Sequence[Member],
        *,
        spmd: bool = False,
        concurrency: int = 1,
        beside: bool = False,
        start_timeout: float = 600.0,
        closing: float = 5.0,
        watch: Watch | None = None,
    ) -> None:
        """`name` is for people, as in "training rank" 3; a worker runs `concurrency` calls at a time, and
        one of `submit_beside` besides.

        At the end of its block those that have a `close` get `closing` seconds for it before they are ended.
        Groups of one `watch` notice, whomever they wait for, when a member of an SPMD group among them ends.
        """
        self._name, self._worker, self._members = name, worker, tuple(members)
        self._spmd, self._concurrency, self._start_timeout = spmd, concurrency, start_timeout
        self._closing = closing
        # Calls of several threads must reach all members of an SPMD group in one order.
        self._alone = threading.RLock()
        # Its name is what `ps` and `ray list actors` show.
        remote: Any = ray.remote
        self._actor: Any = (remote(concurrency_groups={_BESIDE: 1}) if beside else remote)(
            type(worker.__name__, (WorkerHost,), {})
        )
        self._hosts: list[Any] = [None] * len(members)
        self._where: list[Location | None] = [None] * len(members)
        self._closed = ""
        self.before_end: Callable[[IsotrainError], None] | None = None
        """Called before the members of an SPMD group are ended because one has failed."""
        self._starting: set[int] = set()
        self.proxies: WorkerGroup[NodeProxy] | None = None
        """One per machine, where an SPMD group has several machines."""
        self.watch = watch or Watch()
        self.watch.add(self._look_at_ranks)
        self.watch.add(self._look_at_machines)
        try:
            self._start(range(len(members)))
            if spmd:
                self._start_proxies()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._members)

    def __enter__(self) -> WorkerGroup[W]:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._close_in_order()
        finally:
            self.close()

    @property
    def closed(self) -> bool:
        """Whether its workers were ended, or are about to be."""
        return bool(self._closed)

    @property
    def locations(self) -> list[Location]:
        return [where for where in self._where if where is not None]

    def submit(
        self, method: Method[W, P, Result], *args: P.args, **kwargs: P.kwargs
    ) -> list[WorkerCall[Result]]:
        """Start a method on every worker with the same arguments."""
        return [self.submit_to(index, method, *args, **kwargs) for index in range(len(self))]

    def submit_each(
        self, method: Callable[[W, Argument], Result], args: Sequence[Argument]
    ) -> list[WorkerCall[Result]]:
        """Start a method of one argument on every worker, each with its own."""
        assert len(args) == len(self), "an argument for each worker"
        return [self.submit_to(index, method, argument) for index, argument in enumerate(args)]

    def submit_to(
        self, index: int, method: Method[W, P, Result], *args: P.args, **kwargs: P.kwargs
    ) -> WorkerCall[Result]:
        """Start a method on one worker."""
        name = method.__name__
        return WorkerCall(index, name, self._host(index).run.remote(name, *args, **kwargs))

    def submit_beside(
        self, index: int, method: Method[W, P, Result], *args: P.args, **kwargs: P.kwargs
    ) -> WorkerCall[Result]:
        """Start a method on one worker, beside what it is doing, in a group that has room for that."""
        name, remote = method.__name__, self._host(index).run.options(concurrency_group=_BESIDE)
        return WorkerCall(index, name, remote.remote(name, *args, **kwargs))

    def call(self, method: Method[W, P, Result], *args: P.args, **kwargs: P.kwargs) -> list[Result]:
        """Run a method on every worker and wait; results by worker."""
        return self.within(None).call(method, *args, **kwargs)

    def call_each(self, method: Callable[[W, Argument], Result], args: Sequence[Argument]) -> list[Result]:
        """Run a method of one argument on every worker, each with its own, and wait."""
        return self.within(None).call_each(method, args)

    def call_on(self, index: int, method: Method[W, P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """Run a method on one worker and wait."""
        return self.within(None).call_on(index, method, *args, **kwargs)

    def within(self, timeout: float | None) -> TimedCalls[W]:
        """For calls that must end in time: `group.within(60).call(Worker.method)`."""
        return TimedCalls(self, timeout)

    def in_turn(self) -> AbstractContextManager[object]:
        """For several calls to an SPMD group, between which no other thread may call it."""
        return self._alone if self._spmd else nullcontext()

    def peer(self, index: int) -> WorkerPeer[W]:
        """One worker, for others to call; a restart makes another one of it."""
        return WorkerPeer(self._host(index))

    def stream(
        self, index: int, method: Method[W, P, Iterator[Result]], *args: P.args, **kwargs: P.kwargs
    ) -> Stream[Result]:
        """Start a method that yields on one worker; see `next_item`."""
        name, remote = method.__name__, self._host(index).stream.options(num_returns="streaming")
        return Stream(index, name, remote.remote(name, *args, **kwargs))

    def results(self, calls: Sequence[WorkerCall[Result]], timeout: float | None = None) -> list[Result]:
        """Wait for calls and give their results in order; the first failure ends the waiting.

        An error of isotrain arrives as it was raised, any other as a ClusterError with the worker's
        traceback, the end of a worker's process as WorkerDied.
        """
        replies = self._gather(self, calls, timeout, grace=GRACE if self._spmd else 0.0)
        return [replies[call] for call in calls]

    def through_proxies(
        self, method: str, args: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any], timeout: float | None
    ) -> list[Any]:
        """Run a method on every worker, each with its arguments, by one call to each machine."""
        assert self.proxies is not None and len(args) == len(self), "arguments for each worker"
        self._host(0)  # says why where the group has ended
        machines = self._machines()
        calls = [
            self.proxies.submit_to(
                team[0],
                NodeProxy.run,
                method,
                {index: args[index] for number in team for index in machines[number]},
                kwargs,
                timeout,
            )
            for team in teams(len(machines))
        ]
        # They tell who is late, and wait for the cause of a failure, before they reply.
        limit = None if timeout is None else timeout + 2 * LEEWAY
        replies = self._gather(self.proxies, calls, limit, grace=2 * LEEWAY)
        values = {index: value for call in calls for index, value in replies[call].items()}
        return [values[index] for index in range(len(self))]

    def _gather(
        self,
        called: WorkerGroup[Any],
        calls: Sequence[WorkerCall[Result]],
        timeout: float | None,
        grace: float,
    ) -> dict[WorkerCall[Result], Result]:
        """Results of calls to this group or its proxies; an SPMD group ends with the first failure."""
        # A call reports the end of its own worker, and what that worker was doing.
        gathered = gather(
            {call.ref: call for call in calls},
            called._explain,
            self.watch,
            timeout,
            grace=grace,
            but=self._look_at_ranks,
        )
        if not gathered.failures and not gathered.late:
            return gathered.values
        cause = cause_of(gathered.failures) if gathered.failures else called._overdue(gathered.late, timeout)
        if self._spmd:
            self._closed = f"the group ended after an error: {str(cause).splitlines()[0]}"
            if gathered.failures and self.before_end is not None:
                self.before_end(cause)
            self.close()
        raise cause from None

    def _look_at_ranks(self) -> None:
        """Raise where a member of an SPMD group has ended, although nobody waits for it.

        Not as WorkerDied, which whoever waits for another worker would take for the end of that one.
        """
        hosts = [(index, host) for index, host in enumerate(self._hosts) if self._spmd and host is not None]
        ended = ended_actors() if hosts else set()
        for index, host in hosts:
            if host._actor_id.hex() in ended:
                try:
                    ray.get(host.__ray_ready__.remote(), timeout=GRACE)
                except Exception as error:
                    where = self._where[index]
                    raise WorkerLost(str(explain(error, self._name, index, "", where))) from None

    def restart(self, index: int) -> None:
        """End one worker, whatever it is doing, and start it anew with the same arguments."""
        assert not self._spmd, "the other members of an SPMD group cannot go on without this one"
        if self._closed:
            raise ClusterError(f"{self._name} {index} is not restarted: {self._closed}")
        self._kill(index)
        self._start([index])

    def close(self) -> None:
        """End all workers at once."""
        self._closed = self._closed or "it is closed"
        if self.proxies is not None:
            self.proxies.close()
        for index in range(len(self)):
            self._kill(index)

    def _close_in_order(self) -> None:
        """Workers are killed in the end: what they share with others, only they themselves can remove."""
        if self._closed or not hasattr(self._worker, "close") or not ray.is_initialized():
            return
        here = [index for index, host in enumerate(self._hosts) if host is not None]
        calls = [WorkerCall[None](index, "close", self._hosts[index].run.remote("close")) for index in here]
        self._closed = "it is closed"
        if self._spmd:  # if one fails, the others would wait forever
            with suppress(IsotrainError):
                self.results(calls, self._closing)
        elif calls:
            ray.wait([call.ref for call in calls], num_returns=len(calls), timeout=self._closing)

    def _start(self, indices: Sequence[int]) -> None:
        self._starting |= set(indices)
        try:
            self._look_at_machines()
            self._start_watched(indices)
        except WorkerDied:
            self._look_at_machines()  # perhaps it died with its machine
            raise
        finally:
            self._starting -= set(indices)

    def _start_watched(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._hosts[index] = self._create(self._members[index])
        starts: list[WorkerCall[Location]] = [
            WorkerCall(
                index,
                "start",
                self._hosts[index].start.remote(os.getcwd(), self._worker, *self._members[index].args),
            )
            for index in indices
        ]
        for call, where in zip(starts, self.results(starts, self._start_timeout), strict=True):
            self._where[call.index] = where
            slot = self._members[call.index].slot
            # Ray moves what it reserved on a machine that is lost to another one, with other devices.
            if slot is not None and where.node != slot.node:
                raise self._lost_machine(call.index, slot)

    def _machines(self) -> list[list[int]]:
        """Which workers run on each machine."""
        return machines_of([where.node for where in self.locations])

    def _start_proxies(self) -> None:
        machines = self._machines()
        if len(machines) < 2:  # its own ranks the controller calls itself
            return
        members = [
            Member(
                (self._name, {i: self._hosts[i] for i in ranks}, {i: self._where[i] for i in ranks}),
                slot=self._members[ranks[0]].slot,
            )
            for ranks in machines
        ]
        proxies = self.proxies = WorkerGroup(
            proxy_name(self._name), NodeProxy, members, start_timeout=self._start_timeout, watch=self.watch
        )
        for first, *others in teams(len(machines)):
            if others:
                led = [
                    LedProxy(number, proxies._hosts[number], proxies._where[number], tuple(machines[number]))
                    for number in others
                ]
                proxies.call_on(first, NodeProxy.lead, led)

    def _look_at_machines(self) -> None:
        """Raise where a worker is being started that has no machine to run on any more."""
        slots = [(index, self._members[index].slot) for index in self._starting]
        alive = {node.id for node in living_nodes()} if slots else set()
        for index, slot in slots:
            if slot is not None and slot.node not in alive:
                raise self._lost_machine(index, slot)

    def _lost_machine(self, index: int, slot: Slot) -> ClusterError:
        return WorkerLost(
            f"{self._name} {index} cannot be started: its machine {slot.host} has left the cluster; "
            "run the same command again, with or without that machine, to resume from the newest checkpoint"
        )

    def _create(self, member: Member) -> Any:
        slot = member.slot
        strategy = PlacementGroupSchedulingStrategy(slot.group, slot.bundle) if slot else "SPREAD"
        # Devices are reserved by the placement group and told to workers by environment, because Ray knows no
        # worker that uses the devices of several bundles, nor two that take turns on one.
        return self._actor.options(
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=self._concurrency,
            scheduling_strategy=strategy,
            runtime_env={"env_vars": hub.settings() | dict(member.environment or {})},
        ).remote()

    def _host(self, index: int) -> Any:
        if self._closed or self._hosts[index] is None:
            raise ClusterError(f"{self._name} {index} cannot be called: {self._closed or 'it was ended'}")
        return self._hosts[index]

    def _kill(self, index: int) -> None:
        host, self._hosts[index], self._where[index] = self._hosts[index], None, None
        if host is not None and ray.is_initialized():
            with suppress(ray.exceptions.RayError, ValueError):  # it has ended by itself
                ray.kill(host)

    def _explain(self, call: WorkerCall[Any], error: Exception) -> IsotrainError:
        return explain(error, self._name, call.index, call.method, self._where[call.index])

    def _overdue(self, late: Sequence[WorkerCall[Any]], timeout: float | None) -> Overdue:
        places = {call.index: self._where[call.index] for call in late}
        return overdue(self._name, late[0].method, timeout, places)


@dataclass(frozen=True)
class WorkerPeer(Generic[W]):
    """A worker of a group as other workers see it."""

    host: Any

    def submit(self, method: Method[W, P, Result], *args: P.args, **kwargs: P.kwargs) -> PeerReply[Result]:
        """Start a method."""
        return PeerReply(self.host.run.remote(method.__name__, *args, **kwargs))


@dataclass(frozen=True)
class PeerReply(Generic[Result]):
    """Reply of a peer, perhaps still to come."""

    ref: ObjectRef[Result]

    def is_there(self) -> bool:
        return bool(ray.wait([self.ref], timeout=0)[0])

    def wait(self) -> Result | None:
        """None where the peer is gone."""
        try:
            result: Result = ray.get(self.ref)
            return result
        except DEATHS:
            return None


@dataclass(frozen=True)
class TimedCalls(Generic[W]):
    """Calls to the workers of a group that raise Overdue where a reply takes too long."""

    group: WorkerGroup[W]
    timeout: float | None

    def call(self, method: Method[W, P, Result], *args: P.args, **kwargs: P.kwargs) -> list[Result]:
        with self.group.in_turn():
            if self.group.proxies is not None:
                every = [args] * len(self.group)
                return self.group.through_proxies(method.__name__, every, kwargs, self.timeout)
            return self.group.results(self.group.submit(method, *args, **kwargs), self.timeout)

    def call_each(self, method: Callable[[W, Argument], Result], args: Sequence[Argument]) -> list[Result]:
        with self.group.in_turn():
            if self.group.proxies is not None:
                each = [(argument,) for argument in args]
                return self.group.through_proxies(method.__name__, each, {}, self.timeout)
            return self.group.results(self.group.submit_each(method, args), self.timeout)

    def call_on(self, index: int, method: Method[W, P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        with self.group.in_turn():
            return self.group.results([self.group.submit_to(index, method, *args, **kwargs)], self.timeout)[0]


@dataclass(frozen=True, eq=False)
class Stream(Generic[Result]):
    """A method that yields, running on one worker."""

    index: int
    method: str
    items: ObjectRefGenerator


def next_item(group: WorkerGroup[Any], stream: Stream[Result]) -> Result:
    """The next item, waiting for it; StopIteration after the last. Errors are those of `group.results`."""
    item: WorkerCall[Result] = WorkerCall(stream.index, stream.method, next(stream.items))
    return group.results([item])[0]


def wait_any(
    watch: Watch, works: Sequence[WorkerCall[Any] | Stream[Any]], deadline: float | None = None
) -> list[int]:
    """Indices of streams that have an item, have ended or have failed: at least one unless time runs out."""
    refs = [work.items if isinstance(work, Stream) else work.ref for work in works]
    ready = {id(ref) for ref in watch.wait(refs, deadline, fetch_local=False)}
    return [number for number, ref in enumerate(refs) if id(ref) in ready]
