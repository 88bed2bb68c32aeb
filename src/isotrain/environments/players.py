"""Who plays episodes with the policy: environments that answer it, or agents that call it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from isotrain.data.trajectory import Trajectory
from isotrain.environments.conversation import TokenSequence
from isotrain.environments.episode import (
    Episode,
    EpisodeLimits,
    EpisodeTask,
    Generate,
    plain_prompt,
    play_steps,
    play_tools,
)
from isotrain.environments.processes import EnvironmentProcess, EpisodeFailed
from isotrain.environments.session import ParserOf, Session
from isotrain.environments.template import TurnTemplate
from isotrain.environments.tool_calls import Parser
from isotrain.errors import EpisodeError, RolloutError

if TYPE_CHECKING:
    from isotrain.environments.gateway import Gateway


class Player(Protocol):
    async def start(self) -> None:
        """Once, before the first episode."""

    async def play(
        self, process: EnvironmentProcess, task: EpisodeTask, generate: Generate
    ) -> list[Trajectory]:
        """All sequences of one episode, also of a failed one; raises what ends all episodes."""

    async def close(self) -> None: ...


class EnvironmentPlayer:
    """The policy writes, and the environment answers."""

    def __init__(
        self, known: Mapping[str, Any], template: TurnTemplate, limits: EpisodeLimits, parse: Parser
    ) -> None:
        """`known` of the environment by its process."""
        self._known, self._template, self._limits, self._parse = known, template, limits, parse

    async def start(self) -> None:
        pass

    async def play(
        self, process: EnvironmentProcess, task: EpisodeTask, generate: Generate
    ) -> list[Trajectory]:
        episode = Episode(task, self._template, process, generate, self._limits)
        try:
            if self._known["kind"] == "tools":
                reward = await play_tools(episode, self._known["tools"], self._parse)
            else:
                reward = await play_steps(episode)
        except Exception as error:
            return episode.trajectories(None, _one_episode(error))
        return episode.trajectories(reward)

    async def close(self) -> None:
        pass


class AgentPlayer:
    """The agent calls the policy whenever it wants, through the gateway."""

    def __init__(
        self, gateway: Gateway, template: TurnTemplate, limits: EpisodeLimits, parser_of: ParserOf
    ) -> None:
        self._gateway, self._template, self._limits = gateway, template, limits
        self._parser_of = parser_of

    async def start(self) -> None:
        await self._gateway.start()

    async def play(
        self, process: EnvironmentProcess, task: EpisodeTask, generate: Generate
    ) -> list[Trajectory]:
        session = Session(task, self._template, self._parser_of, generate, self._limits)
        key = self._gateway.open(session)
        asked: asyncio.Future[Any] = asyncio.ensure_future(
            process.ask(
                "run",
                base_url=self._gateway.base_url,
                api_key=key,
                row=dict(task.values),
                seed=task.seed,
            )
        )
        try:
            await asyncio.wait([asked, session.broken], return_when=asyncio.FIRST_COMPLETED)
            if session.broken.done():
                session.broken.result()
            reward = (await asked)["reward"]
            return session.trajectories(None if reward is None else float(reward))
        except Exception as error:
            return session.trajectories(None, _one_episode(error))
        finally:
            self._gateway.end(key)
            session.broken.cancel()
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await asked

    async def close(self) -> None:
        await self._gateway.close()


def unplayed(task: EpisodeTask, template: TurnTemplate, failed: EpisodeFailed) -> list[Trajectory]:
    """The trajectories of an episode that could not begin."""
    prompt = TokenSequence(plain_prompt(template, task.messages))
    return task.trajectories([prompt], finished=False, reward=None, failed=failed)


def _one_episode(error: Exception) -> EpisodeFailed:
    """The failure of one episode; raises an error that all episodes would have."""
    if isinstance(error, EpisodeFailed):
        return error
    if isinstance(error, (EpisodeError, RolloutError, OSError)):
        raise error  # of the engine, or of the file
    # From text that templates, tokenizers or parsers do not take.
    return EpisodeFailed("error", f"{type(error).__name__}: {error}")
