"""Turns of episodes that wait for the engine, in the place of prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from isotrain.rollout.base import Request
from isotrain.trainers.online.messages import PromptRequest


class TurnSupply:
    """Filled by episodes from their own thread. To the engine, each turn is a draw with one response."""

    def __init__(self, width: int) -> None:
        self.width = width
        """Turns that the engine may have at a time."""
        self.under_way = True
        """Until it is closed: episodes that wait for their environments are no reason to change weights."""
        self._waiting: deque[Request] = deque()
        self._taken: dict[int, Request] = {}

    @property
    def ready(self) -> bool:
        return bool(self._waiting) or not self.under_way

    @property
    def exhausted(self) -> bool:
        return not self.under_way and not self._waiting

    def add(self, turn: Request) -> None:
        """`turn.prompt_index` is a number of its own."""
        self._waiting.append(turn)

    def close(self) -> None:
        """No more will come."""
        self.under_way = False

    def take(self, unfinished: int, width: int = 0) -> Sequence[PromptRequest]:
        taken: list[PromptRequest] = []
        while self._waiting and unfinished + len(taken) < max(self.width, width):
            turn = self._waiting.popleft()
            self._taken[turn.prompt_index] = turn
            taken.append(PromptRequest(turn.prompt_index, turn.row))
        return taken

    def requests(self, taken: Sequence[PromptRequest]) -> list[Request]:
        return [self._taken.pop(prompt_index) for prompt_index, _ in taken]
