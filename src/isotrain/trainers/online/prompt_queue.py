"""One queue of prompts that all engines draw from, so that none waits while another has prompts left."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from isotrain.cluster.workers import PeerReply, WorkerPeer
from isotrain.trainers.online.messages import PromptRequest


class PromptQueue:
    """A worker; prompts that are collected together have a number, because batches overlap."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[PromptRequest]] = {}

    def start(self) -> None:
        """Workers have a `start`; here nothing has to be made ready."""

    def fill(self, number: int, prompt_requests: Sequence[PromptRequest]) -> None:
        self._waiting[number] = deque(prompt_requests)

    def draw(self, number: int, most: int) -> list[PromptRequest]:
        """The next ones; fewer than `most`, perhaps none, when they run out."""
        waiting = self._waiting.get(number, deque())
        drawn = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        if not waiting:
            self._waiting.pop(number, None)
        return drawn


@dataclass(frozen=True)
class Draws:
    """An engine's access to the queue, in place of prompts."""

    queue: WorkerPeer[PromptQueue]
    number: int
    at_once: int
    """Prompts that one engine may have at a time: an equal share, so that the first does not draw all."""


class Supply:
    """Prompts as an engine has room for them; a list is given at once, whatever its length, or gradually."""

    def __init__(self, prompts: Sequence[PromptRequest] | Draws, room: int, *, gradual: bool = False) -> None:
        """`room`: prompts whose responses the engine generates at the same time."""
        self._draws = prompts if isinstance(prompts, Draws) else None
        self._rest = [] if isinstance(prompts, Draws) else list(prompts)
        self._most = len(self._rest)
        if gradual:
            self._most = min(room, self._most)
        if self._draws is not None:
            # More than there is room for: the engine goes on with them until it gets the next. Not gradually,
            # because what waits in the engine would keep a weight check waiting.
            self._most = min(self._draws.at_once, room + (0 if gradual else 1 + room // 4))
        self._fewest = 1 + min(room, self._most) // 8
        """That the queue is asked for, while the engine has some."""
        self._asked = 0
        self._reply: PeerReply[list[PromptRequest]] | None = None

    @property
    def exhausted(self) -> bool:
        """Whether all have been given; of a queue, whether it is known to be empty."""
        return self._draws is None and not self._rest

    ready, under_way = True, False
    """Whether it has something for the engine now, and whether something outside of it goes on."""

    @property
    def width(self) -> int:
        """Prompts that it would have under way at most."""
        return self._most

    def take(self, unfinished: int, width: int = 0) -> Sequence[PromptRequest]:
        """Given how many prompts the engine has; waits for some only if it has none.

        `width`: how many it may have, where other calls have made it wider than this one would.
        """
        most = max(0, max(self._most, width) - unfinished)
        if self._draws is None:
            taken, self._rest = self._rest[:most], self._rest[most:]
            return taken
        if self._reply is None and (most >= self._fewest or not unfinished):
            self._reply = self._draws.queue.submit(PromptQueue.draw, self._draws.number, most)
            self._asked = most
        if self._reply is None or (unfinished and not self._reply.is_there()):
            return ()
        # None where the queue is lost: its prompts will be asked for again.
        drawn, self._reply = self._reply.wait() or [], None
        if len(drawn) < self._asked:
            self._draws = None
        return drawn
