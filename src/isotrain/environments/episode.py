"""One episode: the policy and its environment take turns until one of them ends it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from isotrain.data.trajectory import Trajectory
from isotrain.environments.conversation import Conversation, TokenSequence, as_trajectories
from isotrain.environments.interfaces import as_tool_message
from isotrain.environments.processes import EnvironmentProcess, EpisodeFailed
from isotrain.environments.template import Message, TextDigest, TurnTemplate
from isotrain.environments.tool_calls import Parsed, Parser
from isotrain.errors import DataError

Generate = Callable[[Sequence[int], int, int], Awaitable[Trajectory]]
"""Has the policy continue tokens, by so many at most. The last is the number of the turn, or one that stands
for it: the turn's seed comes from it."""


History = Literal["split", "extend", "refuse"]
"""The behaviour where the chat template rewrites earlier turns."""


@dataclass(frozen=True)
class EpisodeLimits:
    turns: int
    turn: int
    """Most tokens of one turn."""
    prompt: int
    """Most tokens of a prompt."""
    response: int
    """Most tokens of a sequence after its prompt."""
    history: History
    vocabulary: int
    """Tokens that the model has."""


@dataclass(frozen=True)
class EpisodeTask:
    """The row, sample and seed that an episode is played for."""

    row: int
    prompt_index: int
    sample: int
    seed: int
    messages: Sequence[Message]
    """The prompt of the row."""
    values: Mapping[str, Any]
    """All values of the row."""
    answer: Any
    """Its reference answer."""

    def trajectories(
        self,
        sequences: Sequence[TokenSequence],
        finished: bool,
        reward: float | None,
        failed: EpisodeFailed | None,
    ) -> list[Trajectory]:
        """The trajectories of the episode, with its reward or failure."""
        return as_trajectories(
            sequences,
            row=self.row,
            prompt_index=self.prompt_index,
            sample=self.sample,
            seed=self.seed,
            finished=finished,
            reward=reward,
            failure=failed.failure if failed else None,
            detail=failed.detail if failed else "",
        )


class Episode:
    """Plays one task. Its tokens are in `conversation` at any time, also when it fails."""

    def __init__(
        self,
        task: EpisodeTask,
        template: TurnTemplate,
        environment: EnvironmentProcess,
        generate: Generate,
        limits: EpisodeLimits,
    ) -> None:
        self.task, self.template, self.environment = task, template, environment
        self.limits, self._generate = limits, generate
        self.conversation: Conversation | None = None
        self.finished = False
        """Whether the policy, or its environment, came to an end."""
        self._turns = self._longest = 0

    def begin(self, prompt: str) -> Conversation:
        """The policy reads its prompt."""
        tokens = self.template.encode(prompt)
        if not tokens:
            raise EpisodeFailed("error", "the prompt is empty")
        if len(tokens) > self.limits.prompt:
            raise EpisodeFailed(
                "error",
                f"the prompt with tools and observation has {len(tokens)} tokens, data.max_length is "
                f"{self.limits.prompt}",
            )
        self._longest = len(tokens) + self.limits.response
        self.conversation = Conversation(tokens)
        return self.conversation

    async def turn(self) -> Trajectory | None:
        """Generate the policy's next turn; None if it has no turn or no room left."""
        assert self.conversation is not None
        room = min(self.limits.turn, self._longest - len(self.conversation.tokens))
        if self._turns == self.limits.turns or room <= 0:
            return None
        wrote = await self._generate(self.conversation.tokens, room, self._turns)
        self._turns += 1
        self.conversation.wrote(wrote)
        return wrote

    async def ask(self, request: str, **values: Any) -> dict[str, Any]:
        """The environment's reply; its time belongs to the last turn."""
        started = time.monotonic()
        try:
            return await self.environment.ask(request, **values)
        finally:
            if self._turns and self.conversation is not None:
                self.conversation.add_outcome(seconds=time.monotonic() - started)

    def trajectories(self, reward: float | None, failed: EpisodeFailed | None = None) -> list[Trajectory]:
        if self.conversation is None:  # it failed before its prompt was known
            self.conversation = Conversation(plain_prompt(self.template, self.task.messages))
        return self.task.trajectories(self.conversation.sequences, self.finished, reward, failed)


def plain_prompt(template: TurnTemplate, messages: Sequence[Message]) -> list[int]:
    """The prompt of the row alone; its plain words where the template refuses the messages."""
    try:
        return template.encode(template.prompt(messages, None))
    except DataError:
        words = "\n".join(str(message["content"]) for message in messages)
        return template.encode(words) or [0]


async def play_tools(episode: Episode, tools: Sequence[Message], parse: Parser) -> float | None:
    """The policy calls tools until it answers without; returns the reward, if the environment gives one."""
    task, template = episode.task, episode.template
    reset = await episode.ask("reset", row=dict(task.values), seed=task.seed)
    messages = _with_observation(task.messages, reset["observation"])
    called = list(messages)
    prompt = template.prompt(messages, tools)
    text, conversation = TextDigest(prompt), episode.begin(prompt)
    while (wrote := await episode.turn()) is not None and wrote.finished:
        tokens = wrote.response_N.tolist()
        said, ended_by = template.decode(tokens), template.decode(tokens[-1:])
        words = said.removesuffix(ended_by)
        parsed = parse(words)
        if not parsed.calls and not parsed.malformed:
            episode.finished = True
            break
        answers = [as_tool_message("", {"error": parsed.malformed})] if parsed.malformed else []
        conversation.add_outcome(calls=max(1, len(parsed.calls)), failures=len(answers))
        for call in parsed.calls:
            reply = await episode.ask("call", name=call.name, arguments=dict(call.arguments))
            conversation.add_outcome(failures=int("error" in reply))
            answers.append(as_tool_message(call.name, reply))
        messages += [{"role": "assistant", "content": words}, *answers]
        called += _with_calls(words, parsed, answers)
        between = template.between(ended_by, answers, tools)
        whole = partial(render, template, messages, called, tools)
        text = _go_on(episode, text.then(said), between, whole)
    reward = (await episode.ask("reward"))["reward"]
    return None if reward is None else float(reward)


def _with_calls(words: str, parsed: Parsed, answers: Sequence[Message]) -> list[Message]:
    """The policy's message, with its calls apart from its words, and the answers to them."""
    if not parsed.calls:  # malformed ones: no tool has answered
        said = {"role": "assistant", "content": words}
        return [said, *({"role": "user", "content": answer["content"]} for answer in answers)]
    functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in parsed.calls]
    named = [
        {"type": "function", "id": f"call{i:05d}", "function": function}
        for i, function in enumerate(functions)
    ]
    return [{"role": "assistant", "content": parsed.spoken, "tool_calls": named}, *answers]


def render(
    template: TurnTemplate,
    messages: Sequence[Message],
    called: Sequence[Message],
    tools: Sequence[Message] | None,
) -> str:
    """The whole conversation. Calls are part of what was said: a template would write them in its own way.

    Some templates refuse answers of tools without calls before them; these get the calls apart.
    """
    try:
        return template.prompt(messages, tools)
    except DataError:
        return template.prompt(called, tools)


def _with_observation(messages: Sequence[Message], observation: str | None) -> list[Message]:
    """As TRL does: what `reset` returns is added to the last message."""
    if observation is None:
        return list(messages)
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last['content']}{observation}"}]


def _go_on(episode: Episode, so_far: TextDigest, between: str | None, whole: Callable[[], str]) -> TextDigest:
    """Give the policy what comes next; returns all that it has read and written as text."""
    conversation = episode.conversation
    assert conversation is not None
    if tokens_stay(episode.limits.history, so_far, between, whole):
        assert between is not None
        conversation.given(episode.template.encode(between))
        return so_far.then(between)
    text = whole()
    conversation.anew(episode.template.encode(text))
    return TextDigest(text)


def tokens_stay(history: History, so_far: TextDigest, between: str | None, whole: Callable[[], str]) -> bool:
    """Whether the tokens so far are kept and `between` follows; otherwise a sequence begins with `whole`.

    They are kept wherever the template would render them again as the same text.
    """
    if between is not None and (history == "extend" or TextDigest(whole()) == so_far.then(between)):
        return True
    if history != "split":
        raise EpisodeFailed("error", "the chat template rewrites earlier turns; set `history` to split")
    return False


async def play_steps(episode: Episode) -> float | None:
    """After each turn the environment says what follows, as text; returns the sum of its rewards."""
    task, template = episode.task, episode.template
    states = {"observation": template.prompt(task.messages, None), "label": task.answer}
    observation = str((await episode.ask("reset", states=states, seed=task.seed))["observation"])
    conversation = episode.begin(observation)
    total = 0.0
    while (wrote := await episode.turn()) is not None:
        action = template.spoken(wrote.response_N.tolist())
        states = {"observation_text": observation, "action_text": action, "label": task.answer}
        reply = await episode.ask("step", states=states)
        reward, feedback = float(reply["reward"] or 0.0), str(reply["feedback"])
        conversation.add_outcome(reward=reward)
        total += reward
        if reply["done"]:
            episode.finished = True
            break
        observation += action + feedback
        conversation.given(template.encode(feedback))
    return total
