"""Groups of episodes on one engine: while one waits for its environment, the engine writes for the others."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from isotrain.agents.episode import Episode, Limits, Task, play_steps, play_tools
from isotrain.agents.processes import EnvironmentProcesses, EpisodeFailed
from isotrain.agents.template import TurnTemplate
from isotrain.agents.tool_calls import HERMES, Parsed, Parser, as_call, hermes, parser_name
from isotrain.data.formats import Conversation, prompt_of, value_at
from isotrain.data.rows import Row
from isotrain.data.trajectory import Trajectory, sample_seed, with_common_prompt
from isotrain.errors import EpisodeError, RolloutError
from isotrain.models.load import load_tokenizer, model_directory
from isotrain.recipe.schema import Recipe
from isotrain.rollout.base import Request, Sampling
from isotrain.trainers.online.engine_loop import EngineLoop, Prompts
from isotrain.trainers.online.messages import PromptRequest
from isotrain.trainers.online.prompt_queue import Supply
from isotrain.trainers.online.turn_supply import TurnSupply

# How often prompts that other engines could take are asked for, while episodes are under way.
LOOK_SECONDS = 0.05

ReadRow = Callable[[int], dict[str, Any]]
"""All values of a row, by its number."""


class Episodes:
    def __init__(self, recipe: Recipe, source: str, loop: EngineLoop) -> None:
        """`source` is the text of the environment's file."""
        assert recipe.rollout is not None and recipe.rollout.environment is not None
        environment = recipe.rollout.environment
        tokenizer = load_tokenizer(model_directory(recipe.model.path))
        self._loop, self._seed = loop, recipe.seed
        self._prompt_key = recipe.data.prompt_key
        self._answer_key = recipe.reward.answer_key if recipe.reward else ""
        self._template = TurnTemplate(tokenizer)
        longest = recipe.rollout.max_tokens
        self._limits = Limits(
            turns=environment.max_turns,
            turn=environment.max_turn_tokens or longest,
            prompt=recipe.data.max_length,
            response=longest,
            history=environment.history,
        )
        self._processes = EnvironmentProcesses(
            environment.path,
            source,
            time_limit=environment.time_limit,
            start_timeout=environment.start_timeout,
            memory=int(environment.memory_gb * 2**30) if environment.memory_gb else None,
            passed=environment.variables,
        )
        self._processes.start()
        self._parse = self._parser(environment.tool_parser, tokenizer)
        self.at_once = environment.concurrency or loop.engine.at_once
        """Episodes under way at a time."""
        self._turn_numbers = itertools.count()
        self._closed = False
        self._events = asyncio.new_event_loop()
        threading.Thread(target=self._events.run_forever, name="episodes", daemon=True).start()

    def _parser(self, name: str, tokenizer: Any) -> Parser:
        if self._processes.known["kind"] != "tools":
            return hermes  # never asked
        if name == "auto":
            name = parser_name(str(tokenizer.chat_template))
        if name == HERMES:
            return hermes
        from isotrain.rollout.vllm_tools import tool_calls

        read = tool_calls(name, tokenizer, self._processes.known["tools"])

        def parse(text: str) -> Parsed:
            try:
                calls, tried = read(text)
                return Parsed(
                    tuple(as_call(called, arguments) for called, arguments in calls),
                    "invalid tool call" if tried and not calls else "",
                )
            except (ValueError, RecursionError) as error:
                return Parsed(malformed=f"invalid tool call: {error}")

        return parse

    def generate(
        self, supply: Supply, read_row: ReadRow, n: int, sampling: Sampling, version: int, *, urgent: bool
    ) -> Iterator[list[Trajectory]]:
        """All sequences of the `n` episodes of a draw together, as soon as the last of them has ended."""
        turns = TurnSupply(max(1, self._loop.engine.at_once - self._loop.in_flight))
        call = _Call(self._loop, turns, sampling, self._turn_numbers)
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
        call: _Call,
        ended: Callable[[list[Trajectory] | BaseException], None],
    ) -> None:
        async def group() -> None:
            try:
                values = read_row(draw.row)
                episodes = [self._play(draw, sample, values, call) for sample in range(n)]
                found = await asyncio.gather(*episodes)
                ended(with_common_prompt([t for sequences in found for t in sequences]))
            except BaseException as error:
                ended(error)

        if self._closed:
            raise RolloutError("the environments were closed")
        asyncio.run_coroutine_threadsafe(group(), self._events)

    async def _play(
        self, draw: PromptRequest, sample: int, values: dict[str, Any], call: _Call
    ) -> list[Trajectory]:
        seed = sample_seed(self._seed, draw.prompt_index, sample)
        answer = value_at(values, self._answer_key)
        task = Task(draw.row, draw.prompt_index, sample, seed, self._messages(values), values, answer)

        async def generate(tokens: Sequence[int], room: int, turn: int) -> Trajectory:
            return await call.turn(task, tokens, room, turn)

        process = None
        try:
            process = await self._processes.open()
            episode = Episode(task, self._template, process, generate, self._limits)
            try:
                if self._processes.known["kind"] == "tools":
                    reward = await play_tools(episode, self._processes.known["tools"], self._parse)
                else:
                    reward = await play_steps(episode)
            except EpisodeFailed as failed:
                return episode.trajectories(None, failed)
            except (EpisodeError, RolloutError, OSError):
                raise  # of the engine, or of the file: all episodes have it
            except Exception as error:  # from text that templates, tokenizers or parsers do not take
                return episode.trajectories(None, EpisodeFailed("error", f"{type(error).__name__}: {error}"))
            return episode.trajectories(reward)
        finally:
            if process is not None:
                self._processes.end(process)

    def _messages(self, values: dict[str, Any]) -> list[dict[str, Any]]:
        prompt = prompt_of(Row(values, "the row"), self._prompt_key, has_template=True)
        assert isinstance(prompt, Conversation)
        return [message.as_dict() for message in prompt.messages]

    def close(self) -> None:
        self._closed = True
        self._processes.close()
        self._events.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._events):
            task.cancel()
        self._events.call_soon(self._events.stop)  # after they have heard of it


class _Call:
    """Between episodes and the engine's thread: each turn is asked for, and waits for what comes."""

    def __init__(
        self, loop: EngineLoop, turns: TurnSupply, sampling: Sampling, numbers: Iterator[int]
    ) -> None:
        self._loop, self._turns, self._sampling, self._numbers = loop, turns, sampling, numbers
        self._waiting: dict[int, Future[Trajectory]] = {}
        self._lock = threading.Lock()
        self._over: BaseException | None = None

    async def turn(self, task: Task, tokens: Sequence[int], room: int, turn: int) -> Trajectory:
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
    """What a later turn is sampled with: its own numbers, from the episode and the turn alone."""
    return int.from_bytes(hashlib.sha256(f"{seed} {turn}".encode()).digest()[:4], "big") >> 1
