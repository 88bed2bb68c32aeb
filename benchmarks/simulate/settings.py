"""What a simulated run is made of."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field
from typing import Literal

from simulate.lengths import Lengths


@dataclass(frozen=True)
class Decode:
    """Seconds that an engine takes for one more token of all running sequences.

    base + per_sequence x running sequences + per_cached_token x tokens in their caches.
    """

    base: float
    per_sequence: float = 0.0
    per_cached_token: float = 0.0
    prefill_per_token: float = 0.0
    """Decoding stops while a prompt is computed, once for all responses to it."""

    def __post_init__(self) -> None:
        if self.base <= 0:
            raise ValueError("a token takes time: base must be above 0")


@dataclass(frozen=True)
class Engines:
    count: int
    decode: Decode
    at_once: int
    """Sequences that one engine runs at the same time."""
    even_share: bool = True
    """Whether an engine holds at most an equal part of a batch, as isotrain does; otherwise all it can."""
    one_queue: bool = True
    """Whether all draw prompts from one queue; otherwise each gets an equal part in advance."""
    slower: tuple[float, ...] = ()
    """Times as slow as the others, for the first ones."""

    def decode_of(self, number: int) -> Decode:
        factor = self.slower[number] if number < len(self.slower) else 1.0
        return Decode(*(factor * value for value in astuple(self.decode)))


@dataclass(frozen=True)
class Rewards:
    seconds: float = 0.0
    sigma: float = 0.0
    """Of the logarithm, if times differ; `seconds` is then the median."""
    at_once: int | None = None
    """Responses that are scored at the same time; None is no limit."""


@dataclass(frozen=True)
class Update:
    """Seconds of all ranks for a step: fixed + tokens x per_token, mini-batch by mini-batch.

    No mini-batch is faster than its longest sequence on the ranks that share one sequence.
    """

    fixed: float = 0.0
    per_token: float = 0.0
    per_token_of_longest: float = 0.0
    mini_batches: int = 1


@dataclass(frozen=True)
class Sync:
    """New weights: `publish` keeps the ranks busy, `load` each engine."""

    publish: float = 0.0
    load: float = 0.0


@dataclass(frozen=True)
class Controller:
    """Seconds of the one controller."""

    a_step: float = 0.0
    """While ranks wait: planning, advantages, calls."""
    a_group: float = 0.0
    """To collect the responses to one prompt, one after the other; others are generated meanwhile."""


def controller_seconds(
    *, ranks: int, agents: int, calls: int, own: float, per_rank: float, per_agent_call: float
) -> float:
    """Of one step: own work, a part of it for each rank, and calls to each agent."""
    return own + per_rank * ranks + per_agent_call * agents * calls


@dataclass(frozen=True)
class Run:
    prompts: int
    """Of a step."""
    n: int
    lengths: Lengths
    engines: Engines
    update: Update
    sync: Sync = field(default_factory=Sync)
    rewards: Rewards = field(default_factory=Rewards)
    controller: Controller = field(default_factory=Controller)
    prompt_tokens: int = 0
    placement: Literal["separate", "colocated"] = "separate"
    switch: float = 0.0
    """Colocated: seconds to give the devices to the other side, twice a step."""
    staleness: float = 0.0
    """Batches that engines may begin beyond the one that the newest weights are for."""
    in_flight: bool = False
    """Engines take weights between two tokens; otherwise after the last response of a batch."""
    order: Literal["drawn", "finished"] = "drawn"
    """`finished`: a step takes the first groups that are ready, and longer responses continue in the next."""

    def __post_init__(self) -> None:
        if min(self.prompts, self.n, self.engines.count, self.engines.at_once) < 1 or self.staleness < 0:
            raise ValueError("prompts, n, engines and at_once must be at least 1, staleness at least 0")
        if self.order == "drawn" and self.staleness != math.floor(self.staleness):
            raise ValueError("a part of a batch as staleness needs order='finished'")
        if self.placement == "colocated" and self.staleness and self.order == "drawn":
            raise ValueError("colocated engines cannot generate ahead: order='finished' or staleness=0")

    @property
    def width(self) -> int:
        """Responses that one engine may hold."""
        if not self.engines.even_share:
            return max(self.n, self.engines.at_once)
        share = -(-self.prompts // self.engines.count) * self.n
        return max(self.n, min(self.engines.at_once, share))
