"""Groups of episodes on one engine: while one waits for its environment, the engine writes for the others."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from isotrain.data.formats import ChatRow, prompt_of, value_at
from isotrain.data.rows import Row
from isotrain.data.trajectory import Trajectory, sample_seed, with_common_prompt
from isotrain.environments.episode import EpisodeLimits, EpisodeTask
from isotrain.environments.players import AgentPlayer, EnvironmentPlayer, Player, unplayed
from isotrain.environments.processes import EnvironmentProcesses, EpisodeFailed
from isotrain.environments.session import ParserOf
from isotrain.environments.template import TurnTemplate
from isotrain.environments.tool_calls import HERMES, Parser, hermes, parser_name, vllm_parser
from isotrain.errors import RolloutError
from isotrain.models.config import vocabulary_size
from isotrain.models.files import load_tokenizer, model_directory
from isotrain.models.load import read_config
from isotrain.recipe.environment import AgentSection, EnvironmentSection
from isotrain.recipe.schema import Recipe
from isotrain.rollout.base import Request, Sampling
from isotrain.trainers.online.engine_loop import EngineLoop, Prompts, TurnSupply
from isotrain.trainers.online.messages import PromptRequest
from isotrain.trainers.online.prompt_queue import Supply

# How often prompts that other engines could take are asked for, while episodes are under way.
LOOK_SECONDS = 0.05
STOP_SECONDS = 10.0
MOST_PARSERS = 256

ReadRow = Callable[[int], dict[str, Any]]
"""All values of a row, by its number."""


class Episodes:
    def __init__(self, recipe: Recipe, source: str, loop: EngineLoop) -> None:
        """`source` is the text of the file of the environment or agent."""
        assert recipe.rollout is not None and recipe.rollout.episodes is not None
        section: EnvironmentSection | AgentSection = recipe.rollout.episodes
        self._loop, self._seed = loop, recipe.seed
        self._prompt_key = recipe.data.prompt_key
        self._answer_key = recipe.reward.answer_key if recipe.reward else ""
        self._processes = _processes(section, source)
        self._processes.start()
        directory = model_directory(recipe.model.path)
        vocabulary = vocabulary_size(read_config(directory))
        limits = _limits(section, recipe.data.max_length, recipe.rollout.max_tokens, vocabulary)
        tokenizer = load_tokenizer(directory)
        self._template = TurnTemplate(tokenizer)
        parser_of = _parser_of(section, tokenizer)
        self._player = _player(section, self._processes.known, self._template, limits, parser_of)
        self.at_once = section.concurrency or loop.engine.at_once
        """Episodes under way at a time."""
        self._turn_numbers = itertools.count()
        self._closed = False
        self._events = asyncio.new_event_loop()
        threading.Thread(target=self._run_events, name="episodes", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._player.start(), self._events).result()

    def generate(
        self, supply: Supply, read_row: ReadRow, n: int, sampling: Sampling, version: int, *, urgent: bool
    ) -> Iterator[list[Trajectory]]:
        """All sequences of the `n` episodes of a draw together, as soon as the last of them has ended."""
        turns = TurnSupply(max(1, self._loop.engine.at_once - self._loop.in_flight))
        call = _EpisodeTurns(self._loop, turns, sampling, self._turn_numbers)
        self._loop.serve(Prompts(turns, turns.requests, 1, sampling, version, urgent, finished=call))
        ended: queue.SimpleQueue[list[Trajectory] | BaseException] = queue.SimpleQueue()
        groups = 0
        try:
            while True:
                for draw in supply.take(groups) if not supply.exhausted else ():
                    groups += 1
                    self._begin(draw, n, read_row, call, ended.put)
                if groups == 0:
                    return
                try:
                    group = ended.get(timeout=None if supply.exhausted else LOOK_SECONDS)
                except queue.Empty:
                    continue
                groups -= 1
                if isinstance(group, BaseException):
                    raise group
                yield group
        finally:
            call.abandon()
            turns.close()
            self._loop.look_again()

    def _begin(
        self,
        draw: PromptRequest,
        n: int,
        read_row: ReadRow,
        call: _EpisodeTurns,
        ended: Callable[[list[Trajectory] | BaseException], None],
    ) -> None:
        async def group() -> None:
            try:
                values = read_row(draw.row)
                episodes = [self._play(draw, sample, values, call) for sample in range(n)]
                played = await asyncio.gather(*episodes)
                ended(with_common_prompt([t for sequences in played for t in sequences]))
            except BaseException as error:
                ended(error)

        if self._closed:
            raise RolloutError("the environments were closed")
        asyncio.run_coroutine_threadsafe(group(), self._events)

    async def _play(
        self, draw: PromptRequest, sample: int, values: dict[str, Any], call: _EpisodeTurns
    ) -> list[Trajectory]:
        seed = sample_seed(self._seed, draw.prompt_index, sample)
        answer = value_at(values, self._answer_key)
        task = EpisodeTask(draw.row, draw.prompt_index, sample, seed, self._messages(values), values, answer)

        async def generate(tokens: Sequence[int], room: int, turn: int) -> Trajectory:
            return await call.turn(task, tokens, room, turn)

        try:
            process = await self._processes.open()
        except EpisodeFailed as failed:
            return unplayed(task, self._template, failed)
        try:
            return await self._player.play(process, task, generate)
        finally:
            self._processes.end(process)

    def _messages(self, values: dict[str, Any]) -> list[dict[str, Any]]:
        prompt = prompt_of(Row(values, "the row"), self._prompt_key, has_template=True)
        assert isinstance(prompt, ChatRow)
        return [message.as_dict() for message in prompt.messages]

    def close(self) -> None:
        """May be called twice."""
        if not self._closed:
            self._closed = True
            self._processes.close()
            asyncio.run_coroutine_threadsafe(self._stop(), self._events)

    def _run_events(self) -> None:
        self._events.run_forever()
        self._events.close()

    async def _stop(self) -> None:
        await self._player.close()
        under_way = asyncio.all_tasks(self._events) - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way, timeout=STOP_SECONDS)
        self._events.stop()


def _limits(
    section: EnvironmentSection | AgentSection, prompt: int, response: int, vocabulary: int
) -> EpisodeLimits:
    turn = section.max_turn_tokens or response
    return EpisodeLimits(section.max_turns, turn, prompt, response, section.history, vocabulary)


def _processes(section: EnvironmentSection | AgentSection, source: str) -> EnvironmentProcesses:
    loaded: dict[str, Any] = {"section": "environment", "path": section.path, "source": source}
    if isinstance(section, AgentSection):
        loaded |= {"section": "agent", "command": section.command}
        if section.verifiers:
            loaded = {"section": "agent", "verifiers": section.verifiers, "arguments": section.arguments}
    return EnvironmentProcesses(
        loaded,
        time_limit=section.time_limit,
        start_timeout=section.start_timeout,
        memory=int(section.memory_gb * 2**30) if section.memory_gb else None,
        passed=section.variables,
        python=section.python if isinstance(section, AgentSection) else None,
    )


def _player(
    section: EnvironmentSection | AgentSection,
    known: Mapping[str, Any],
    template: TurnTemplate,
    limits: EpisodeLimits,
    parser_of: ParserOf,
) -> Player:
    if isinstance(section, AgentSection):
        from isotrain.environments.gateway import Gateway

        return AgentPlayer(Gateway(), template, limits, parser_of)
    # What policies write to environments without tools is never parsed.
    parse = parser_of(known["tools"]) if known["kind"] == "tools" else hermes
    return EnvironmentPlayer(known, template, limits, parse)


def _parser_of(section: EnvironmentSection | AgentSection, tokenizer: Any) -> ParserOf:
    made: dict[bytes, Parser] = {}
    name = section.tool_parser

    def parser_of(tools: Sequence[Mapping[str, Any]]) -> Parser:
        chosen = parser_name(str(tokenizer.chat_template)) if name == "auto" else name
        if chosen == HERMES:
            return hermes
        key = hashlib.sha256(repr(tools).encode()).digest()
        if key not in made:
            if len(made) >= MOST_PARSERS:  # agents may offer other tools in every call
                made.clear()
            made[key] = vllm_parser(chosen, tokenizer, tools)
        return made[key]

    return parser_of


class _EpisodeTurns:
    """Between episodes and the engine's thread: each turn is asked for, and waits for what comes."""

    def __init__(
        self, loop: EngineLoop, turns: TurnSupply, sampling: Sampling, numbers: Iterator[int]
    ) -> None:
        self._loop, self._turns, self._sampling, self._numbers = loop, turns, sampling, numbers
        self._waiting: dict[int, Future[Trajectory]] = {}
        self._lock = threading.Lock()
        self._over: BaseException | None = None

    async def turn(self, task: EpisodeTask, tokens: Sequence[int], room: int, turn: int) -> Trajectory:
        future: Future[Trajectory] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._over is not None:
                raise self._over
            self._waiting[number] = future
        seed = task.seed if turn == 0 else turn_seed(task.seed, turn)
        prompt_P = np.array(tokens, np.int32)
        self._turns.add(Request(task.row, number, task.sample, seed, prompt_P, room))
        self._loop.look_again()
        return await asyncio.wrap_future(future)

    def put(self, group: list[Trajectory] | BaseException | None, /) -> None:
        """By the engine's thread: a turn that was written, or the end of all."""
        if isinstance(group, list):
            (turn,) = group
            with self._lock:
                future = self._waiting.pop(turn.prompt_index, None)
            if future is not None and future.set_running_or_notify_cancel():
                future.set_result(turn)
            return
        self._end(group or RolloutError("the engine ended before its episodes"))

    def abandon(self) -> None:
        self._end(RolloutError("nobody waits for these episodes"))

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._over = self._over or error
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a later turn, from the episode's seed and the turn alone."""
    return int.from_bytes(hashlib.sha256(f"{seed} {turn}".encode()).digest()[:4], "big") >> 1
