"""Recipe sections for agents: the environment that the policy acts in, or the agent that calls it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from isotrain.language import tr
from isotrain.recipe.section import Affects, Section

_IN_FILE = r"^[^:\x00]+\.py:[A-Za-z_]\w*$"


class EpisodeSection(Section):
    """Fields of all episodes, whoever plays them."""

    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Longest turn in tokens; by default what `rollout.max_tokens` leaves of the episode."""
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
    """Environment variables with keys or tokens that the process may see, such as `SEARCH_API_KEY`."""


class EnvironmentSection(EpisodeSection):
    path: str = Field(pattern=_IN_FILE)
    """A Python file and a class in it, `env.py:Calculator`: an environment as TRL takes it, or an agent with
    `reset` and `step` as OpenRLHF takes it."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum turns of the policy in an episode."""
    time_limit: Annotated[float, Affects.COURSE] = Field(default=60.0, gt=0)
    """Timeout of one call of the environment in seconds; the episode then fails."""


class AgentSection(EpisodeSection):
    path: str | None = Field(default=None, pattern=_IN_FILE)
    """A Python file and a function in it, `agent.py:run`. It gets `base_url`, `api_key` and `row`, calls the
    policy as an OpenAI client does, and returns a reward."""
    command: list[str] | None = Field(default=None, min_length=1)
    """A program instead, `[node, agent.js]`. It finds the endpoint in `OPENAI_BASE_URL` and `OPENAI_API_KEY`,
    reads the row as JSON from its standard input, and posts a reward."""
    verifiers: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w./@-]*$")
    """An environment of the package verifiers instead, by name. Its rows are written by
    `isotrain prepare verifiers`."""
    arguments: dict[str, Any] = Field(default={})
    """What `verifiers` loads the environment with: from 0.4 on its block `[env]`, such as `{taskset: {split:
    train}}`, before that the keyword arguments of `load_environment`."""
    max_turns: int = Field(default=32, ge=1)
    """Maximum calls of the policy in an episode; further ones are refused."""
    time_limit: Annotated[float, Affects.COURSE] = Field(default=600.0, gt=0)
    """Timeout of the whole episode in seconds; it then fails."""
    python: Annotated[str | None, Affects.EXECUTION] = None
    """The Python that runs the agent, where its packages do not go with those of isotrain; isotrain itself
    must be installed there, without extras. By default the trainer's."""

    @model_validator(mode="after")
    def _one_of_them(self) -> AgentSection:
        if sum(choice is not None for choice in (self.path, self.command, self.verifiers)) != 1:
            raise ValueError(tr("one of path, command and verifiers is needed, such as path: agent.py:run"))
        if self.arguments and self.verifiers is None:
            raise ValueError(tr("arguments are for verifiers: name an environment there, or remove them"))
        return self


class EnvironmentRewardSection(Section):
    weight: float = 1.0
    """Weight of this reward in the sum."""
