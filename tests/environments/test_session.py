"""What agents call through the gateway is trained on as it was given and sampled, token by token."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from templates import TEMPLATES, tokenizer_with
from test_exact_tokens import Sampler

from isotrain.data.trajectory import Trajectory, with_common_prompt
from isotrain.environments.episode import EpisodeLimits, EpisodeTask
from isotrain.environments.openai_messages import Completion, Refused, chat_reply, chat_request
from isotrain.environments.processes import EpisodeFailed
from isotrain.environments.session import Session
from isotrain.environments.template import TurnTemplate
from isotrain.environments.tool_calls import hermes

EPISODES = 1000
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wo?"}]

_T = TypeVar("_T")


def run(play: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(play)


def session_of(tiny: Path, name: str, sampler: Any, **limits: Any) -> Session:
    template = TurnTemplate(tokenizer_with(tiny / "model", name))
    task = EpisodeTask(0, 7, 1, 5, [{"role": "user", "content": "Wo?"}], {}, None)
    given = {"turns": 40, "turn": 300, "prompt": 512, "response": 2000, "history": "split"}
    given |= {"vocabulary": 512, **limits}
    return Session(task, template, lambda tools: hermes, sampler, EpisodeLimits(**given))


async def ask(session: Session, messages: Sequence[Any], **options: Any) -> tuple[dict[str, Any], Completion]:
    """The reply's message, as a client has it after JSON, and what the engine wrote."""
    body = {"messages": list(messages), **options}
    completion = await session.chat(chat_request(json.loads(json.dumps(body))))
    reply = json.loads(json.dumps(chat_reply(completion, 0, body)))
    return reply["choices"][0]["message"], completion


def check(sequences: Sequence[Trajectory], calls: Sequence[tuple[list[int], list[int]]]) -> None:
    """Every call of the engine is in one of the sequences once, and nothing else counts as written."""
    left = [(given, wrote) for given, wrote in calls]
    for trajectory in sequences:
        assert trajectory.episode is not None
        written_N = np.zeros(len(trajectory.mask_N), np.bool_)
        for turn in trajectory.episode.turns:
            start = trajectory.prompt_length + turn.start
            given = trajectory.tokens_T[:start].tolist()
            left.remove((given, trajectory.response_N[turn.start : turn.end].tolist()))
            written_N[turn.start : turn.end] = True
        assert (trajectory.mask_N == written_N).all()
        assert trajectory.mask_N[-1] and not trajectory.logp_N[~written_N].any()
    assert not left


async def wander(session: Session, draw: random.Random) -> int:
    """An agent as they come: goes on, tries again from an earlier point, asks others, edits what was said."""
    talks: list[list[dict[str, Any]]] = [list(ASKED)]
    edited = 0
    for _ in range(draw.randrange(1, 7)):
        messages = list(draw.choice(talks[-3:]))
        kind = draw.random()
        if kind < 0.1:
            messages = [{"role": "user", "content": f"Another one {draw.random()}"}]
        said, _ = await ask(session, messages, tools=TOOLS)
        if kind > 0.93:
            said, edited = {"role": "assistant", "content": "My own words."}, edited + 1
        elif kind > 0.85 and said["content"]:
            said["content"] = f" {said['content'].strip()}\n"  # frameworks trim
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": " é found \n"}
            for call in said.get("tool_calls") or ()
        ]
        talks.append([*messages, said, *(answers or [{"role": "user", "content": "Go on."}])])
    return edited


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_of_random_agents_are_those_of_the_engine(tiny: Path, name: str) -> None:
    longest = turns = 0

    async def one(number: int) -> None:
        nonlocal longest, turns
        tokenizer = tokenizer_with(tiny / "model", name)
        sampler = Sampler(TurnTemplate(tokenizer), len(tokenizer), number)
        session = session_of(tiny, name, sampler)
        await wander(session, random.Random(number))
        sequences = session.trajectories(0.5)
        check(sequences, sampler.calls)
        check(with_common_prompt(sequences), sampler.calls)
        turns += len(sampler.calls)
        longest = max(longest, *(len(each.episode.turns) for each in sequences if each.episode))

    for number in range(EPISODES):
        run(one(number))
    assert turns > 2 * EPISODES and longest >= 3


class Says:
    """An engine that says these things, with the pieces that no encoder would make, one letter each."""

    def __init__(self, template: TurnTemplate, *sayings: str) -> None:
        self.template, self.sayings = template, list(sayings)
        self.calls: list[tuple[list[int], list[int]]] = []

    async def __call__(self, tokens: Sequence[int], room: int, turn: int) -> Trajectory:
        letters = [token for letter in self.sayings.pop(0) for token in self.template.encode(letter)]
        wrote = [*letters, 2][:room]
        self.calls.append((list(tokens), wrote))
        ones = np.ones(len(wrote))
        whole = np.array([*tokens, *wrote], np.int32)
        versions = ones.astype(np.int32)
        return Trajectory(
            0, 0, 0, 0, len(tokens), whole, ones == 1, -ones.astype(np.float32), versions, wrote[-1] == 2
        )


def saying(tiny: Path, *sayings: str, **limits: Any) -> tuple[Session, Says]:
    says = Says(TurnTemplate(tokenizer_with(tiny / "model", "chatml")), *sayings)
    return session_of(tiny, "chatml", says, **limits), says


def test_turns_continue_one_sequence(tiny: Path) -> None:
    async def play() -> None:
        session, says = saying(tiny, "the answer", "no")
        said, first = await ask(session, ASKED)
        assert said == {"role": "assistant", "content": "the answer"}
        # Decoded and encoded again they would be other tokens.
        assert says.template.encode("the answer") != first.tokens[:-1]
        await ask(session, [*ASKED, said, {"role": "user", "content": "Sure?"}])
        (trajectory,) = session.trajectories(1.0)
        check([trajectory], says.calls)
        assert trajectory.finished and trajectory.episode and trajectory.episode.reward == 1.0
        text = says.template.decode(trajectory.tokens_T.tolist())
        assert text.endswith(
            "the answer<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nno<|im_end|>"
        )

    run(play())


def test_calls_at_the_same_time_are_sequences_of_their_own(tiny: Path) -> None:
    async def play() -> None:
        session, says = saying(tiny, "a", "b", "c", "d")
        said, _ = await ask(session, ASKED)
        on = [*ASKED, said, {"role": "user", "content": "On"}]
        await asyncio.gather(*(ask(session, on) for _ in range(3)))
        sequences = session.trajectories(None)
        check(sequences, says.calls)
        assert len(sequences) == 3 and [len(t.episode.turns) for t in sequences if t.episode] == [2, 1, 1]
        # Those that branch off have the tokens of the first turn by their ids, and do not train them again.
        first, second, _ = sequences
        common = second.prompt_length
        assert first.tokens_T[:common].tolist() == second.tokens_T[:common].tolist()

    run(play())


def test_seeds_depend_on_what_is_asked_alone(tiny: Path) -> None:
    async def play(order: Sequence[str]) -> dict[str, list[int]]:
        numbers: dict[str, list[int]] = {}
        says = Says(TurnTemplate(tokenizer_with(tiny / "model", "chatml")), *["x"] * 4)

        async def generate(tokens: Sequence[int], room: int, turn: int) -> Trajectory:
            numbers.setdefault(says.template.decode(tokens), []).append(turn)
            return await says(tokens, room, turn)

        session = session_of(tiny, "chatml", generate)
        for what in order:
            await ask(session, [{"role": "user", "content": what}])
        return numbers

    one, other = run(play(["a", "b", "a"])), run(play(["b", "a", "a"]))
    assert one == other and all(len(set(seeds)) == len(seeds) for seeds in one.values())


def test_stop_words_end_a_turn(tiny: Path) -> None:
    async def play() -> None:
        session, says = saying(tiny, "Action: look\nObservation: nothing", "fine")
        said, completion = await ask(session, ASKED, stop=["\nObservation:"])
        assert said["content"] == "Action: look" and completion.finished
        await ask(session, [*ASKED, said, {"role": "user", "content": "Observation: a cat"}])
        (trajectory,) = session.trajectories(None)
        text = says.template.decode(trajectory.tokens_T.tolist())
        assert "look\nObservation:<|im_end|>\n<|im_start|>user\nObservation: a cat<|im_end|>" in text
        assert trajectory.mask_N.sum() == len(completion.tokens) + len("fine") + 1

    run(play())


@pytest.mark.parametrize("stop", ["<|im_end|>", "swer<|im_end|>", "<|im_", "answer"])
def test_stop_words_do_not_double_the_end_of_a_turn(tiny: Path, stop: str) -> None:
    async def play() -> None:
        session, says = saying(tiny, "the answer", "no")
        said, _ = await ask(session, ASKED, stop=[stop])
        assert said["content"] == "the answer".partition(stop.removesuffix("<|im_end|>") or "<")[0]
        await ask(session, [*ASKED, said, {"role": "user", "content": "Sure?"}])
        (trajectory,) = session.trajectories(None)  # what the policy wrote stays as it is
        check([trajectory], [(says.calls[0][0], first_turn(trajectory)), says.calls[1]])
        text = says.template.decode(trajectory.tokens_T.tolist())
        assert "the answer<|im_end|>\n<|im_start|>user\nSure?<|im_end|>" in text

    run(play())


def first_turn(trajectory: Trajectory) -> list[int]:
    assert trajectory.episode is not None
    turn = trajectory.episode.turns[0]
    return list(trajectory.response_N[turn.start : turn.end].tolist())


def test_a_turn_that_no_parser_reads_is_not_trained(tiny: Path) -> None:
    """The agent has not got it: only the turn that it got is part of the episode."""

    async def play() -> None:
        session, says = saying(tiny, "unseen", "seen")
        parsers = [fails, hermes]
        session._parser_of = lambda tools: parsers.pop(0)
        with pytest.raises(KeyError):
            await ask(session, ASKED, tools=TOOLS)
        await ask(session, ASKED, tools=TOOLS)
        check(session.trajectories(None), says.calls[1:])

    def fails(text: str) -> Any:
        raise KeyError("function")

    run(play())


def held(value: Any, seen: set[int] | None = None) -> int:
    """Bytes of a value and of all that it refers to, each counted once."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, type) or callable(value):
        return 0
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, np.ndarray):
        return sys.getsizeof(value) if value.base is None else held(value.base, seen)
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set)):
        parts = list(value)
    else:
        parts = [*vars(value).values()] if hasattr(value, "__dict__") else []
        parts += [getattr(value, name) for name in getattr(type(value), "__slots__", ())]
    return sys.getsizeof(value) + sum(held(part, seen) for part in parts)


@pytest.mark.parametrize("name", ["chatml", "thinking"])
@pytest.mark.parametrize("branches", [1, 2])
def test_memory_grows_with_the_tokens_of_a_conversation(tiny: Path, name: str, branches: int) -> None:
    """Also where calls branch off, and where the template rewrites turns: what is common is shared."""

    async def play(turns: int) -> int:
        says = Says(
            TurnTemplate(tokenizer_with(tiny / "model", name)), *["<think>x</think>answer"] * turns * branches
        )
        limits = {"turns": turns * branches, "prompt": 100_000, "response": 100_000}
        session = session_of(tiny, name, says, **limits)
        messages: list[Any] = list(ASKED)
        for _ in range(turns):
            for _ in range(branches):
                said, _ = await ask(session, messages)
            messages += [said, {"role": "user", "content": "Go on. " * 5}]
        assert len(says.calls) == turns * branches
        kept = (session._calls, session._by_messages, session._sequences, session._longest)
        return held(kept)

    small, middle, large = (run(play(turns)) for turns in (10, 20, 40))
    # Tables of dictionaries and lists grow in leaps; a quadratic part would double the second growth.
    assert large - middle < 1.4 * 2 * (middle - small)


def test_what_leaves_no_room_is_not_held(tiny: Path) -> None:
    async def play() -> None:
        session, _ = saying(tiny, "a", "b")
        said, completion = await ask(session, ASKED)
        before = held(session._sequences)
        long = {"role": "user", "content": "word " * 20_000}
        with pytest.raises(Refused, match="no room"):
            await ask(session, [*ASKED, said, long])
        with pytest.raises(Refused, match="no room"):
            await ask(session, [long])
        with pytest.raises(Refused, match="no room"):
            await session.complete([*completion.prompt, *completion.tokens, *[5] * 100_000], None, ())
        assert held(session._sequences) == before
        await ask(session, [*ASKED, said, {"role": "user", "content": "shorter"}])
        (trajectory,) = session.trajectories(None)
        assert trajectory.episode and len(trajectory.episode.turns) == 2

    run(play())


def test_tool_calls_are_parsed_and_wrong_ones_stay_text(tiny: Path) -> None:
    async def play() -> None:
        call = '{"name": "find", "arguments": {"key": "é"}}'
        session, says = saying(
            tiny, f"I look. <tool_call>{call}</tool_call>", "<tool_call>{</tool_call>", "x"
        )
        said, _ = await ask(session, ASKED, tools=TOOLS)
        assert said["content"].strip() == "I look."
        (made,) = said["tool_calls"]
        assert made["function"]["name"] == "find" and json.loads(made["function"]["arguments"]) == {
            "key": "é"
        }
        on = [*ASKED, said, {"role": "tool", "tool_call_id": made["id"], "content": "a"}]
        wrong, _ = await ask(session, on, tools=TOOLS)
        assert "tool_calls" not in wrong
        await ask(session, [*on, wrong, {"role": "user", "content": "?"}], tools=TOOLS)
        (trajectory,) = session.trajectories(None)
        assert trajectory.episode
        assert [(t.calls, t.failures) for t in trajectory.episode.turns] == [(1, 0), (1, 1), (0, 0)]
        check([trajectory], says.calls)

    run(play())


def test_completions_continue_a_sequence_of_tokens(tiny: Path) -> None:
    async def play() -> None:
        session, says = saying(tiny, "ab", "cd", "ef")
        first = await session.complete([1, 5, 6], None, ())
        await session.complete([*first.prompt, *first.tokens, 9], None, ())
        await session.complete([1, 5, 7], None, ())
        sequences = session.trajectories(None)
        check(sequences, says.calls)
        assert [len(t.episode.turns) for t in sequences if t.episode] == [2, 1]
        with pytest.raises(Refused, match="empty"):
            await session.complete([], None, ())

    run(play())


def test_refuses_calls_beyond_the_budgets(tiny: Path) -> None:
    async def play() -> None:
        session, _ = saying(tiny, "abcdef", "gh", "x", turns=3, response=8)
        said, completion = await ask(session, ASKED, max_tokens=4)
        assert said["content"] == "abcd" and not completion.finished
        long = [*ASKED, said, {"role": "user", "content": "more " * 20}]
        with pytest.raises(Refused, match="no room") as refused:
            await ask(session, long)
        assert refused.value.code == "context_length_exceeded"
        await ask(session, ASKED)
        with pytest.raises(Refused, match="3 calls") as refused:
            await ask(session, ASKED)
        assert refused.value.status == 403
        assert not any(trajectory.finished for trajectory in session.trajectories(None))

    run(play())


def test_takes_rewards_of_turns_and_of_the_episode(tiny: Path) -> None:
    async def play() -> None:
        session, _ = saying(tiny, "a", "b")
        said, first = await ask(session, ASKED)
        await ask(session, [*ASKED, said, {"role": "user", "content": "?"}])
        session.reward(0.25, first.id)
        session.reward(1, None)
        for wrong in (True, "1", float("nan"), None):
            with pytest.raises(Refused, match="finite number"):
                session.reward(wrong, None)
        with pytest.raises(Refused, match="'chatcmpl-x'"):
            session.reward(1.0, "chatcmpl-x")
        (trajectory,) = session.trajectories(None)
        assert trajectory.episode and trajectory.episode.reward == 1.25
        assert [turn.reward for turn in trajectory.episode.turns] == [0.25, 0.0]

    run(play())


def test_what_nobody_read_is_no_part_of_it(tiny: Path) -> None:
    async def play() -> None:
        session, says = saying(tiny, "a", "lost", "b")
        said, _ = await ask(session, ASKED)
        on = [*ASKED, said, {"role": "user", "content": "?"}]
        _, lost = await ask(session, on)
        session.unread(lost)
        await ask(session, on)
        sequences = session.trajectories(None)
        check(sequences, [says.calls[0], says.calls[2]])

    run(play())


def test_a_rewritten_history_can_be_refused(tiny: Path) -> None:
    async def play(history: str) -> list[Trajectory]:
        says = Says(TurnTemplate(tokenizer_with(tiny / "model", "thinking")), "<think>x</think>a", "b")
        session = session_of(tiny, "thinking", says, history=history)
        said, _ = await ask(session, ASKED)
        on = [*ASKED, said, {"role": "user", "content": "?"}]
        if history == "refuse":
            with pytest.raises(Refused, match="rewrites earlier turns"):
                await ask(session, on)
        else:
            await ask(session, on)
        return session.trajectories(1.0)

    assert len(run(play("split"))) == 2 and len(run(play("extend"))) == 1
    (refused,) = run(play("refuse"))
    assert refused.episode and refused.episode.failure == "error"


def test_an_agent_without_calls_leaves_an_empty_trajectory(tiny: Path) -> None:
    async def play() -> None:
        session, _ = saying(tiny)
        (trajectory,) = session.trajectories(None, EpisodeFailed("crash", "gone"))
        assert trajectory.episode and trajectory.episode.failure == "crash" and not len(trajectory.mask_N)

    run(play())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "role"),
        ({"messages": ["hello"]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "only text"),
        ({"messages": ASKED, "n": 2}, "one completion"),
        ({"messages": ASKED, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": ASKED, "max_tokens": -1}, "max_tokens"),
        ({"messages": ASKED, "stop": [1]}, "stop"),
        ({"messages": ASKED, "tools": "all"}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool call"),
    ],
)
def test_requests_that_cannot_be_done(body: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why):
        chat_request(body)
