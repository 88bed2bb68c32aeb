"""One agent's calls of the policy, put together as sequences of tokens.

A call that continues an earlier one keeps its tokens by their ids. All others begin a sequence of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from isotrain.agents.conversation import TokenSequence
from isotrain.agents.episode import Generate, Limits, Task, plain_prompt, render, tokens_stay
from isotrain.agents.openai_messages import ChatRequest, Completion, Refused, identity, sent_back
from isotrain.agents.processes import EpisodeFailed
from isotrain.agents.template import Message, TurnTemplate
from isotrain.agents.tool_calls import Parsed, Parser
from isotrain.data.trajectory import Trajectory
from isotrain.errors import DataError

ParserOf = Callable[[Sequence[Message]], Parser]
"""The parser of calls of these tools."""

_Key = tuple[Any, ...]


@dataclass
class _Call:
    """An answered call: where others can go on."""

    sequence: TokenSequence
    turn: int
    end: int
    """Tokens of its sequence up to here: all that the policy had read and written."""
    before: _Call | None
    """The call that it continued."""
    added: str
    """Text since then: what the policy was given, and what it wrote."""
    words: str
    """What it wrote."""
    ended_by: str
    answered: float
    """When the agent got it."""
    continued: bool = False
    """Whether another call has its sequence."""

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens[: self.end]

    @property
    def text(self) -> str:
        parts, call = [], self
        while call is not None:
            parts.append(call.added)
            call = call.before  # type: ignore[assignment]
        return "".join(reversed(parts))


@dataclass(frozen=True)
class _Place:
    """Where a call's turn will stand."""

    sequence: TokenSequence
    before: _Call | None
    given: str
    """Text that the policy reads since the call before."""


class Session:
    """The calls of one episode, which may come at the same time. All is called in one event loop."""

    def __init__(
        self,
        task: Task,
        template: TurnTemplate,
        parser_of: ParserOf,
        generate: Generate,
        limits: Limits,
    ) -> None:
        self.task, self._template, self._limits = task, template, limits
        self._parser_of, self._generate = parser_of, generate
        self._sequences: list[TokenSequence] = []
        self._longest: dict[TokenSequence, int] = {}
        self._calls: dict[str, _Call] = {}
        self._by_messages: dict[_Key, _Call] = {}
        self._asked = 0
        self._numbers = itertools.count()
        self._prompts: Counter[bytes] = Counter()
        self._reward: float | None = None
        self._cut = False
        self.failed: EpisodeFailed | None = None
        """Why the episode counts as failed, whatever the agent makes of it."""
        self.broken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """Raises what ends all episodes, such as the end of the engine."""

    async def chat(self, request: ChatRequest) -> Completion:
        self._spend()
        tools = list(request.tools) or None
        keys = _keys(request.tools, request.messages)
        try:
            place = self._place(request, tools, keys)
        except DataError as error:
            raise Refused(str(error)) from None
        except EpisodeFailed as failed:
            self.failed = failed
            raise Refused(failed.detail) from None
        parse = self._parser_of(request.tools) if request.tools else None
        completion = await self._turn(place, request.max_tokens, request.stop, parse)
        key = *keys[-1], identity(sent_back(completion))
        self._by_messages[key] = self._calls[completion.id]
        return completion

    async def complete(
        self, prompt: str | Sequence[int], longest: int | None, stop: Sequence[str]
    ) -> Completion:
        """Continue text, or tokens as they are."""
        self._spend()
        tokens = self._template.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise Refused("prompt: it is empty")
        sequence = self._continuing(tokens) or self._begin(tokens)
        return await self._turn(_Place(sequence, None, ""), longest, stop, None)

    def reward(self, value: Any, completion: str | None) -> None:
        """Of the whole episode, or of one completion; rewards of completions add to that of the episode."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise Refused("reward: a finite number is needed")
        if completion is None:
            self._reward = float(value)
        elif (call := self._calls.get(completion)) is None:
            raise Refused(f"completion: this episode has none with the id {completion!r}")
        else:
            call.sequence.came_of_it(call.turn, reward=float(value))

    def unread(self, completion: Completion) -> None:
        """The agent had gone before it got this: it is no part of the episode."""
        call = self._calls.pop(completion.id)
        self._by_messages = {key: other for key, other in self._by_messages.items() if other is not call}
        if not call.continued and call.turn == len(call.sequence.turns) - 1:
            call.sequence.without_last_turn()

    def trajectories(self, returned: float | None, failed: EpisodeFailed | None = None) -> list[Trajectory]:
        """`returned` is the reward that the agent gave at its end; it counts before one that was posted."""
        failed = self.failed or failed
        now = time.monotonic()
        for call in self._calls.values():
            if not call.continued:
                call.sequence.came_of_it(call.turn, seconds=now - call.answered)
        reward = self._reward if returned is None else returned
        turns = [turn.reward for sequence in self._sequences for turn in sequence.turns]
        if any(turns):
            reward = (reward or 0.0) + sum(turns)
        sequences = self._sequences or [TokenSequence(plain_prompt(self._template, self.task.messages))]
        return self.task.trajectories(sequences, bool(self._calls) and not self._cut, reward, failed)

    def _spend(self) -> None:
        self._asked += 1
        if self._asked > self._limits.turns:
            self._cut = True
            raise Refused(
                f"the episode has had its {self._limits.turns} calls (rollout.agent.max_turns)",
                "budget_exceeded",
                403,
            )

    def _place(self, request: ChatRequest, tools: list[Message] | None, keys: Sequence[_Key]) -> _Place:
        template, messages = self._template, request.messages
        known = list(self._known(keys))
        said = [*messages]
        for number, call in known:
            said[number] = {"role": "assistant", "content": call.words}
        whole = partial(render, template, said, messages, tools)
        after = None
        if known:
            number, call = known[-1]
            between = template.between(call.ended_by, messages[number + 1 :], tools)
            if tokens_stay(self._limits.history, call.text, between, whole):
                assert between is not None
                return _Place(self._continued(call, template.encode(between)), call, between)
            after = call.sequence
        text = whole()
        return _Place(self._begin(template.encode(text), after), None, text)

    def _known(self, keys: Sequence[_Key]) -> Iterator[tuple[int, _Call]]:
        """The assistant's messages that this policy wrote, up to the last."""
        for number, key in enumerate(keys):
            if (call := self._by_messages.get(key)) is not None:
                yield number, call

    def _continuing(self, tokens: Sequence[int]) -> TokenSequence | None:
        """The sequence that these tokens continue, the longest of several."""
        fitting = [
            call
            for call in self._calls.values()
            if call.end <= len(tokens) and call.tokens == list(tokens[: call.end])
        ]
        if not fitting:
            return None
        call = max(fitting, key=lambda each: (each.end, not each.continued))
        return self._continued(call, tokens[call.end :])

    def _continued(self, call: _Call, given: Sequence[int]) -> TokenSequence:
        """Where two calls continue the same one, the second begins a sequence with its tokens."""
        if call.continued:
            return self._begin([*call.tokens, *given], call.sequence)
        call.continued = True
        call.sequence.came_of_it(call.turn, seconds=time.monotonic() - call.answered)
        call.sequence.given(given)
        return call.sequence

    def _begin(self, tokens: Sequence[int], after: TokenSequence | None = None) -> TokenSequence:
        sequence = TokenSequence(tokens)
        longest = min(len(tokens), self._limits.prompt) + self._limits.response
        self._longest[sequence] = self._longest[after] if after is not None else longest
        self._sequences.append(sequence)
        return sequence

    async def _turn(
        self, place: _Place, longest: int | None, stop: Sequence[str], parse: Parser | None
    ) -> Completion:
        sequence, prompt = place.sequence, place.sequence.tokens
        left = min(self._longest[sequence] - len(prompt), self._limits.turn)
        if left <= 0:
            self._cut = True
            raise Refused(
                f"the call has {len(prompt)} tokens and leaves no room for a reply (data.max_length "
                f"{self._limits.prompt}, rollout.max_tokens {self._limits.response})",
                "context_length_exceeded",
            )
        room = min(left, longest or left)
        wrote, words, ended_by = self._ended(await self._sampled(prompt, room), stop)
        sequence.wrote(wrote)
        self._cut = self._cut or (not wrote.finished and room == left)
        parsed = parse(words) if parse is not None else Parsed()
        tried = bool(parsed.malformed)
        sequence.came_of_it(calls=len(parsed.calls) or int(tried), failures=int(tried))
        tokens = wrote.response_N.tolist()
        said = self._template.decode(tokens)
        name = f"chatcmpl-{self.task.prompt_index}-{self.task.sample}-{next(self._numbers)}"
        self._calls[name] = _Call(
            sequence,
            turn=len(sequence.turns) - 1,
            end=len(prompt) + len(tokens),
            before=place.before,
            added=place.given + said,
            words=said.removesuffix(ended_by),
            ended_by=ended_by,
            answered=time.monotonic(),
        )
        logps = wrote.logp_N.tolist()
        return Completion(name, prompt, tokens, logps, self._template.decode, words, parsed, wrote.finished)

    async def _sampled(self, prompt: Sequence[int], room: int) -> Trajectory:
        """Calls at the same time may come in any order: their seeds come from what they ask."""
        digest = hashlib.sha256(np.array(prompt, np.int32).tobytes()).digest()
        self._prompts[digest] += 1
        number = int.from_bytes(digest[:8], "big") + self._prompts[digest]
        try:
            return await self._generate(prompt, room, number)
        except Exception as error:
            if not self.broken.done():
                self.broken.set_exception(error)
            raise

    def _ended(self, wrote: Trajectory, stop: Sequence[str]) -> tuple[Trajectory, str, str]:
        """The turn up to its first stop word, its words, and the text of the token that ended it.

        Tokens behind a stop word are dropped: they were sampled, but nobody reads them.
        """
        tokens = wrote.response_N.tolist()
        said = self._template.decode(tokens)
        found = [place for word in stop if (place := said.find(word)) >= 0]
        if found:
            place = min(found)
            word = max((word for word in stop if said.startswith(word, place)), key=len)
            count = next(
                count
                for count in range(1, len(tokens) + 1)
                if word in self._template.decode(tokens[:count])[place:]
            )
            return _first(wrote, count), said[:place], ""
        ended_by = self._template.decode(tokens[-1:]) if wrote.finished else ""
        return wrote, said.removesuffix(ended_by), ended_by


def _first(wrote: Trajectory, count: int) -> Trajectory:
    return replace(
        wrote,
        tokens_T=wrote.tokens_T[: wrote.prompt_length + count],
        mask_N=wrote.mask_N[:count],
        logp_N=wrote.logp_N[:count],
        version_N=wrote.version_N[:count],
        finished=True,
    )


def _keys(tools: Sequence[Message], messages: Sequence[Message]) -> list[_Key]:
    """One for each beginning of a conversation: what it would be known by."""
    found: list[_Key] = []
    key: _Key = (repr(tools),)
    for message in messages:
        key = *key, identity(message)
        found.append(key)
    return found
