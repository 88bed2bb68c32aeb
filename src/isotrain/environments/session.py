"""One agent's calls of the policy, put together as sequences of tokens.

A call that continues an earlier one keeps its tokens by their ids. All others begin a sequence of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from isotrain.data.trajectory import Trajectory
from isotrain.environments.conversation import Tokens, TokenSequence
from isotrain.environments.episode import (
    EpisodeLimits,
    EpisodeTask,
    Generate,
    plain_prompt,
    render,
    tokens_stay,
)
from isotrain.environments.openai_messages import ChatRequest, Completion, Refused, identity, sent_back
from isotrain.environments.processes import EpisodeFailed
from isotrain.environments.template import Message, TextDigest, TurnTemplate
from isotrain.environments.tool_calls import Parsed, Parser
from isotrain.errors import DataError, RolloutError

ParserOf = Callable[[Sequence[Message]], Parser]
"""The parser of calls of these tools."""

# Sums of rewards stay finite in float32.
MOST_REWARD = 1e30

_Key = bytes
"""A digest of tools and messages: of any length, as conversations are kept by all of their beginnings."""


@dataclass(eq=False)
class _CompletedCall:
    """An answered call: where others can go on."""

    sequence: TokenSequence
    turn: int
    tokens: Tokens
    """All that the policy had read and written."""
    text: TextDigest
    """The same as text."""
    words: str
    """The words of its response."""
    ended_by: str
    answered: float
    """When the agent got it."""
    continued: bool = False
    """Whether another call has its sequence."""


@dataclass(frozen=True)
class _SequencePlace:
    """Where a call's turn will stand."""

    sequence: TokenSequence
    text: TextDigest
    """The text that the policy reads there."""


class Session:
    """The calls of one episode, which may come at the same time. All is called in one event loop.

    What is held grows with the tokens of the conversation: calls share those of the calls before. There are
    at most `limits.turns` sequences of at most `limits.prompt + limits.response` tokens.
    """

    def __init__(
        self,
        task: EpisodeTask,
        template: TurnTemplate,
        parser_of: ParserOf,
        generate: Generate,
        limits: EpisodeLimits,
    ) -> None:
        self.task, self._template, self._limits = task, template, limits
        self._parser_of, self._generate = parser_of, generate
        self._sequences: list[TokenSequence] = []
        self._longest: dict[TokenSequence, int] = {}
        self._calls: dict[str, _CompletedCall] = {}
        self._by_messages: dict[_Key, _CompletedCall] = {}
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
            parse = self._parser_of(request.tools) if request.tools else None
            place = self._place(request, tools, keys)
        except DataError as error:
            raise Refused(str(error)) from None
        except RolloutError as error:  # there is no such parser, which the agent cannot know
            self.failed = EpisodeFailed("error", str(error))
            raise Refused(str(error)) from None
        except EpisodeFailed as failed:
            self.failed = failed
            raise Refused(failed.detail) from None
        return await self._turn(place, request.max_tokens, request.stop, parse, keys[-1])

    async def complete(
        self, prompt: str | Sequence[int], longest: int | None, stop: Sequence[str]
    ) -> Completion:
        """Continue text, or tokens as they are."""
        self._spend()
        tokens = self._template.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise Refused("prompt: it is empty")
        known = self._limits.vocabulary
        if (unknown := next((token for token in tokens if not 0 <= token < known), None)) is not None:
            raise Refused(f"prompt: {unknown} is no token of the model, which has 0 to {known - 1}")
        sequence = self._continuing(tokens) or self._begin(Tokens(tokens))
        return await self._turn(_SequencePlace(sequence, TextDigest()), longest, stop, None)

    def reward(self, value: Any, completion: Any) -> None:
        """Reward the whole episode, or one completion; rewards of completions add to that of the episode."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MOST_REWARD:
            raise Refused(f"reward: a finite number is needed, at most {MOST_REWARD:g}")
        if completion is None:
            self._reward = float(value)
        elif not isinstance(completion, str) or (call := self._calls.get(completion)) is None:
            raise Refused(f"completion: this episode has none with the id {completion!r}")
        else:
            call.sequence.add_outcome(call.turn, reward=float(value))

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
                call.sequence.add_outcome(call.turn, seconds=now - call.answered)
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

    def _place(
        self, request: ChatRequest, tools: list[Message] | None, keys: Sequence[_Key]
    ) -> _SequencePlace:
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
                sequence = self._continued(call, template.encode(between))
                return _SequencePlace(sequence, call.text.then(between))
            after = call
        text = whole()
        tokens = template.encode(text)
        if after is None:
            return _SequencePlace(self._begin(Tokens(tokens)), TextDigest(text))
        # Where the template rewrites an earlier turn, what stands before it is the same.
        return _SequencePlace(self._begin(after.tokens.changed_to(tokens), after.sequence), TextDigest(text))

    def _known(self, keys: Sequence[_Key]) -> Iterator[tuple[int, _CompletedCall]]:
        """The assistant's messages that this policy wrote, up to the last."""
        for number, key in enumerate(keys):
            if (call := self._by_messages.get(key)) is not None:
                yield number, call

    def _continuing(self, tokens: Sequence[int]) -> TokenSequence | None:
        """The sequence that these tokens continue, the longest of several."""
        tokens_T = np.array(tokens, np.int32)
        fitting = [call for call in self._calls.values() if call.tokens.begins(tokens_T)]
        if not fitting:
            return None
        call = max(fitting, key=lambda each: (len(each.tokens), not each.continued))
        return self._continued(call, tokens[len(call.tokens) :])

    def _continued(self, call: _CompletedCall, given: Sequence[int]) -> TokenSequence:
        """Where two calls continue the same one, the second begins a sequence with its tokens."""
        if call.continued:
            return self._begin(Tokens(given, call.tokens), call.sequence)
        self._check_room(len(call.tokens) + len(given), self._longest[call.sequence])
        call.continued = True
        call.sequence.add_outcome(call.turn, seconds=time.monotonic() - call.answered)
        call.sequence.given(given)
        return call.sequence

    def _begin(self, tokens: Tokens, after: TokenSequence | None = None) -> TokenSequence:
        longest = min(len(tokens), self._limits.prompt) + self._limits.response
        longest = self._longest[after] if after is not None else longest
        self._check_room(len(tokens), longest)
        sequence = TokenSequence(tokens)
        self._longest[sequence] = longest
        self._sequences.append(sequence)
        return sequence

    def _check_room(self, tokens: int, longest: int) -> None:
        """Before the tokens are held: what an agent sends may be of any length."""
        if tokens >= longest:
            self._cut = True
            raise Refused(
                f"the call has {tokens} tokens and leaves no room for a reply (data.max_length "
                f"{self._limits.prompt}, rollout.max_tokens {self._limits.response})",
                "context_length_exceeded",
            )

    async def _turn(
        self,
        place: _SequencePlace,
        longest: int | None,
        stop: Sequence[str],
        parse: Parser | None,
        messages: _Key | None = None,
    ) -> Completion:
        """`messages`: what the call is known by, if others can continue it by messages."""
        sequence, prompt = place.sequence, place.sequence.tokens
        left = min(self._longest[sequence] - len(prompt), self._limits.turn)
        room = min(left, longest or left)
        wrote, words, ended_by = self._ended(await self._sampled(prompt, room), stop)
        # All that can fail comes first: a turn that the agent does not get is not trained.
        parsed = parse(words) if parse is not None else Parsed()
        tokens, logps = wrote.response_N.tolist(), wrote.logp_N.tolist()
        said = self._template.decode(tokens)
        name = f"chatcmpl-{self.task.prompt_index}-{self.task.sample}-{next(self._numbers)}"
        completion = Completion(
            name, prompt, tokens, logps, self._template.decode, words, parsed, wrote.finished
        )
        key = None if messages is None else _next_key(messages, identity(sent_back(completion)))
        sequence.wrote(wrote)
        self._cut = self._cut or (not wrote.finished and room == left)
        tried = bool(parsed.malformed)
        sequence.add_outcome(calls=len(parsed.calls) or int(tried), failures=int(tried))
        self._calls[name] = call = _CompletedCall(
            sequence,
            turn=len(sequence.turns) - 1,
            tokens=sequence.all,
            text=place.text.then(said),
            words=said.removesuffix(ended_by),
            ended_by=ended_by,
            answered=time.monotonic(),
        )
        if key is not None:
            self._by_messages[key] = call
        return completion

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
        places = [place for word in stop if (place := said.find(word)) >= 0]
        if places:
            place = min(places)
            word = max((word for word in stop if said.startswith(word, place)), key=len)
            count = next(
                count
                for count in range(1, len(tokens) + 1)
                if word in self._template.decode(tokens[:count])[place:]
            )
            # A stop word may be, or end with, the token that ends a turn: the template must not add it again.
            ended_by = self._template.decode(tokens[-1:]) if wrote.finished and count == len(tokens) else ""
            return _first(wrote, count), said[:place], ended_by
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
    keys: list[_Key] = []
    key = _next_key(b"", tools)
    for message in messages:
        key = _next_key(key, identity(message))
        keys.append(key)
    return keys


def _next_key(key: _Key, value: Any) -> _Key:
    return hashlib.sha256(key + repr(value).encode()).digest()
