"""Recipe sections for agents: the environment that the policy acts in, and its reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isotrain.recipe.section import Affects, Section


class EnvironmentSection(Section):
    path: str = Field(pattern=r"^[^:\x00]+\.py:[A-Za-z_]\w*$")
    """A Python file and a class in it, `env.py:Calculator`: an environment as TRL takes it, or an agent with
    `reset` and `step` as OpenRLHF takes it."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum turns of the policy in an episode."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Longest turn in tokens; by default what `rollout.max_tokens` leaves of the episode."""
    time_limit: Annotated[float, Affects.COURSE] = Field(default=60.0, gt=0)
    """Timeout of one call of the environment in seconds; the episode then fails."""
    history: Literal["split", "extend", "refuse"] = "split"
    """What to do where the chat template rewrites earlier turns, such as to drop their thinking: train the
    turn as a sequence of its own, extend the tokens nevertheless, or fail the episode."""
    tool_parser: str = "auto"
    """How tool calls are written: `hermes`, or the name of one of vLLM's tool parsers; `auto` tells it from
    the chat template."""
    concurrency: Annotated[int | None, Affects.EXECUTION] = Field(default=None, ge=1)
    """Maximum episodes at a time per engine and batch, a process each; by default as many as the engine
    generates at once."""
    start_timeout: Annotated[float, Affects.EXECUTION] = Field(default=120.0, gt=0)
    """Timeout of the import of the file, in seconds."""
    memory_gb: Annotated[float | None, Affects.COURSE] = Field(default=None, gt=0)
    """Maximum address space of one process in GiB; by default there is no limit."""
    variables: Annotated[list[str], Affects.EXECUTION] = Field(default=[])
    """Environment variables with keys or tokens that the class may see, such as `SEARCH_API_KEY`."""


class EnvironmentRewardSection(Section):
    weight: float = 1.0
    """Weight of this reward in the sum."""
