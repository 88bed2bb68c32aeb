"""The endpoint that agents call, with the clients that people have."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from templates import tokenizer_with

from isotrain.data.trajectory import Trajectory
from isotrain.environments.episode import EpisodeLimits, EpisodeTask
from isotrain.environments.gateway import Gateway
from isotrain.environments.session import Session
from isotrain.environments.template import TurnTemplate
from isotrain.environments.tool_calls import hermes
from isotrain.errors import RolloutError
from isotrain.rollout.base import check_tokens

END = 2
VOCABULARY = 512
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Looks something up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]
ASKED = [{"role": "user", "content": "Wo?"}]
CALL = 'I look. <tool_call>{"name": "find", "arguments": {"key": "a"}}</tool_call>'
Play = Callable[[str, str, Session], Awaitable[Any]]


class Policy:
    """Says one thing after the other, and remembers what it read."""

    def __init__(self, template: TurnTemplate, sayings: Sequence[str], ponders: bool = False) -> None:
        self.template, self.sayings, self.ponders = template, list(sayings), ponders
        self.read: list[str] = []
        self.interrupted = asyncio.Event()

    async def __call__(self, tokens: Sequence[int], room: int, turn: int) -> Trajectory:
        check_tokens([np.array(tokens, np.int32)], VOCABULARY, "engine")  # as engines do
        self.read.append(self.template.decode(tokens))
        try:
            await (asyncio.Event().wait() if self.ponders else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.interrupted.set()
            raise
        if not self.sayings:
            raise RolloutError("the engine has ended")
        wrote = [*self.template.encode(self.sayings.pop(0)), END]
        ones = np.ones(len(wrote))
        whole = np.array([*tokens, *wrote], np.int32)
        versions = ones.astype(np.int32)
        return Trajectory(0, 0, 0, 0, len(tokens), whole, ones == 1, -ones.astype(np.float32), versions, True)


def limits(**others: Any) -> EpisodeLimits:
    usual = {"turns": 6, "turn": 400, "prompt": 900, "response": 900, "history": "split"}
    return EpisodeLimits(**{**usual, "vocabulary": VOCABULARY, **others})


TASK = EpisodeTask(0, 0, 0, 5, ASKED, {"question": "Wo?", "answer": "a"}, "a")


def with_gateway(tiny: Path, sayings: Sequence[str], play: Play, **others: Any) -> tuple[Session, Policy]:
    """`play` gets the address, a key, and the session behind it."""
    template = TurnTemplate(tokenizer_with(tiny / "model", "chatml"))
    policy = Policy(template, sayings, others.pop("ponders", False))

    async def run() -> Session:
        gateway = Gateway()
        await gateway.start()
        session = Session(TASK, template, lambda tools: hermes, policy, limits(**others))
        try:
            await asyncio.wait_for(play(gateway.base_url, gateway.open(session), session), 60)
        finally:
            await gateway.close()
        return session

    return asyncio.run(run()), policy


async def post(url: str, key: str, body: Any, **others: str) -> tuple[int, dict[str, Any]]:
    """Without any client's help; `others` are headers."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    others = {name.replace("_", "-"): value for name, value in others.items()}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **others}
    request = urllib.request.Request(url, data, headers)

    def send() -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(request, timeout=20) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    return await asyncio.to_thread(send)


def test_openai_client(tiny: Path) -> None:
    openai = pytest.importorskip("openai")

    async def play(url: str, key: str, _: Session) -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key=key)
        messages: list[Any] = list(ASKED)
        first = await client.chat.completions.create(
            model="any", messages=messages, tools=TOOLS, temperature=0.2, logprobs=True
        )
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I look. "
        assert len(choice.logprobs.content) == first.usage.completion_tokens
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"key": "a"}
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "here"}]
        second = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "It is here."
        assert [model.id async for model in client.models.list()] == ["policy"]

    session, policy = with_gateway(tiny, [CALL, "It is here."], play)
    (trajectory,) = session.trajectories(1.0)
    assert trajectory.episode and len(trajectory.episode.turns) == 2 and trajectory.finished
    assert policy.read[1].startswith(policy.read[0] + CALL)


def test_openai_client_streams(tiny: Path) -> None:
    openai = pytest.importorskip("openai")

    async def play(url: str, key: str, _: Session) -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key=key)
        stream = await client.chat.completions.create(
            model="any", messages=ASKED, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "Hello é" and chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens > 1
        async with client.chat.completions.stream(model="any", messages=ASKED, tools=TOOLS) as events:
            final = await events.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.name == "find"

    session, _ = with_gateway(tiny, ["Hello é", CALL], play)
    assert len(session.trajectories(None)) == 2


def test_takes_and_returns_token_ids(tiny: Path) -> None:
    async def play(url: str, key: str, _: Session) -> None:
        body = {"model": "m", "prompt": [1, 5, 6], "return_token_ids": True, "logprobs": 0}
        status, reply = await post(f"{url}/completions", key, body)
        (choice,) = reply["choices"]
        assert status == 200 and choice["text"] == "ab" and choice["prompt_token_ids"] == [1, 5, 6]
        assert choice["token_ids"][-1] == END and len(choice["logprobs"]["token_logprobs"]) == len(
            choice["token_ids"]
        )
        body["prompt"] = [1, 5, 6, *choice["token_ids"], 9]
        assert (await post(f"{url}/completions", key, body))[0] == 200
        body = {"messages": ASKED, "return_token_ids": True}
        _, reply = await post(f"{url}/chat/completions", key, body)
        assert reply["prompt_token_ids"] and reply["choices"][0]["token_ids"][-1] == END

    session, _ = with_gateway(tiny, ["ab", "cd", "ef"], play)
    first, second = session.trajectories(None)
    assert first.episode and len(first.episode.turns) == 2 and second.episode


def test_refuses_wrong_keys(tiny: Path) -> None:
    async def play(url: str, key: str, _: Session) -> None:
        assert url.startswith("http://127.0.0.1:")
        for wrong in ("", "sk-1", key[:-1]):
            status, reply = await post(f"{url}/chat/completions", wrong, {"messages": ASKED})
            assert status == 401 and reply["error"]["code"] == "invalid_api_key"

    _, policy = with_gateway(tiny, [], play)
    assert not policy.read


def test_refusals_are_told_in_openais_words(tiny: Path) -> None:
    openai = pytest.importorskip("openai")

    async def play(url: str, key: str, _: Session) -> None:
        client = openai.AsyncOpenAI(base_url=url, api_key=key)
        await client.chat.completions.create(model="m", messages=ASKED)
        with pytest.raises(openai.PermissionDeniedError, match="1 calls"):
            await client.chat.completions.create(model="m", messages=ASKED)
        for body in (b"{", b"[]", b'{"messages": []}', b"[" * 100_000):
            status, reply = await post(f"{url}/chat/completions", key, body)
            assert status == 400 and reply["error"]["message"]
        status, reply = await post(f"{url}/nothing", key, {})
        assert status == 404 and reply["error"]

    _, policy = with_gateway(tiny, ["a"], play, turns=1)
    assert len(policy.read) == 1


def test_takes_posted_rewards(tiny: Path) -> None:
    async def play(url: str, key: str, _: Session) -> None:
        _, reply = await post(f"{url}/chat/completions", key, {"messages": ASKED})
        assert (await post(f"{url}/reward", key, {"reward": 0.5, "completion": reply["id"]}))[0] == 200
        assert (await post(f"{url}/reward", key, {"reward": 2}))[0] == 200
        assert (await post(f"{url}/reward", key, {"reward": "much"}))[0] == 400

    session, _ = with_gateway(tiny, ["a"], play)
    (trajectory,) = session.trajectories(None)
    assert trajectory.episode and trajectory.episode.reward == 2.5


def test_a_client_that_has_gone(tiny: Path) -> None:
    """What it did not wait for is no part of the episode."""

    async def play(url: str, key: str, session: Session) -> None:
        host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"messages": ASKED}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        policy: Any = session._generate
        while not policy.read:
            await asyncio.sleep(0.01)
        writer.close()
        await policy.interrupted.wait()

    session, policy = with_gateway(tiny, ["lost"], play, ponders=True)
    assert len(policy.read) == 1
    (trajectory,) = session.trajectories(None)
    assert not len(trajectory.mask_N)


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


def called(function: Any) -> list[Any]:
    return [*ASKED, {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}]


def arguments(value: Any) -> list[Any]:
    return called({"name": "find", "arguments": value})


HOSTILE_CHATS: dict[str, Any] = {
    "no messages": {"messages": None},
    "messages by name": {"messages": {"role": "user"}},
    "message is a number": {"messages": [1]},
    "unknown role": {"messages": [{"role": "robot", "content": "x"}]},
    "role is a list": {"messages": [{"role": ["user"], "content": "x"}]},
    "content is a number": {"messages": [{"role": "user", "content": 5}]},
    "content is an image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "half of a surrogate pair": {"messages": [{"role": "user", "content": "a\ud800b"}]},
    "surrogate in a key": {"tools": [{"type": "function", "function": {"name": "f", "\udfff": 1}}]},
    "tool_calls is a number": {"messages": [*ASKED, {"role": "assistant", "tool_calls": 7}]},
    "tool_calls is a text": {"messages": [*ASKED, {"role": "assistant", "tool_calls": "find"}]},
    "call is a list": {"messages": [*ASKED, {"role": "assistant", "tool_calls": [["function"]]}]},
    "function is a text": {"messages": called("find")},
    "function without a name": {"messages": called({"name": None})},
    "tool's name is a number": {"messages": [*ASKED, {"role": "tool", "name": 3, "content": "x"}]},
    "tools is a text": {"tools": "all"},
    "tools is a number": {"tools": 1},
    "tool is a text": {"tools": ["find"]},
    "deep tools": {"tools": [nested(400)]},
    "deep arguments": {"messages": arguments(nested(400))},
    "deep value of an ignored field": {"metadata": nested(400)},
    "not a number": {"temperature": float("nan")},
    "infinite": {"temperature": float("inf")},
    "too large for a float": b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    "temperature is a text": {"temperature": "hot"},
    "temperature is true": {"temperature": True},
    "top_p is a list": {"top_p": [1]},
    "max_tokens is a text": {"max_tokens": "9"},
    "max_tokens is 0": {"max_tokens": 0},
    "max_completion_tokens is 0": {"max_completion_tokens": 0, "max_tokens": 5},
    "max_tokens is true": {"max_tokens": True},
    "max_tokens is a fraction": {"max_tokens": 1.5},
    "two completions": {"n": 2},
    "n is a list": {"n": [1]},
    "stop is a number": {"stop": 1},
    "stop has a number": {"stop": ["a", 1]},
    "empty stop word": {"stop": [""]},
    "many stop words": {"stop": ["a"] * 10_000},
    "stream is a text": {"stream": "yes"},
    "stream_options is a text": {"stream": True, "stream_options": "x"},
    "stream_options is a list": {"stream": True, "stream_options": [1]},
    "logprobs is a text": {"logprobs": "all"},
    "format": {"response_format": {"type": "json_object"}},
    "too long": {"messages": [{"role": "user", "content": "word " * 5_000}]},
    "many messages": {"messages": ASKED * 20_000},
    "many digits": b'{"messages": 1' + b"0" * 10_000 + b"}",
    "no JSON": b"{",
    "no object": b"[]",
    "no text": b"\xff\xfe\x00",
    "deep and unfinished": b'{"a":' * 100_000,
}
HOSTILE_TEXTS: dict[str, Any] = {
    "no prompt": {},
    "empty": {"prompt": []},
    "several prompts": {"prompt": ["a", "b"]},
    "true is no token": {"prompt": [True]},
    "fraction": {"prompt": [1.0]},
    "below the vocabulary": {"prompt": [5, -1]},
    "first that the model has not": {"prompt": [5, VOCABULARY]},
    "beyond 32 bits": {"prompt": [2**31]},
    "beyond 64 bits": {"prompt": [10**30]},
    "as many as fit into a body": {"prompt": [5] * 500_000},
    "half of a surrogate pair": {"prompt": "\ud83d"},
    "echo": {"prompt": "a", "echo": True},
}
HOSTILE_REWARDS: dict[str, Any] = {
    "nothing": {},
    "text": {"reward": "1"},
    "not a number": {"reward": float("nan")},
    "more digits than a float has": {"reward": 10**400},
    "infinite in float32": {"reward": 1e300},
    "id is a list": {"reward": 1.0, "completion": ["x"]},
    "id is an object": {"reward": 1.0, "completion": {}},
    "unknown id": {"reward": 1.0, "completion": "chatcmpl-9"},
}
HOSTILE = [
    *(pytest.param("chat/completions", body, id=f"chat: {name}") for name, body in HOSTILE_CHATS.items()),
    *(pytest.param("completions", body, id=f"text: {name}") for name, body in HOSTILE_TEXTS.items()),
    *(pytest.param("reward", body, id=f"reward: {name}") for name, body in HOSTILE_REWARDS.items()),
]


@pytest.mark.parametrize(("path", "body"), HOSTILE)
def test_a_hostile_request_fails_alone(tiny: Path, path: str, body: Any) -> None:
    """It is answered as wrong, and neither the run nor the episode is any different for it."""
    if isinstance(body, dict) and path == "chat/completions":
        body = {"messages": ASKED, **body}

    async def play(url: str, key: str, session: Session) -> None:
        status, reply = await post(f"{url}/{path}", key, body)
        assert 400 <= status < 500 and reply["error"]["message"], reply
        assert not session.broken.done() and session.failed is None
        assert (await post(f"{url}/chat/completions", key, {"messages": ASKED}))[0] == 200

    session, policy = with_gateway(tiny, ["good", "bad"], play)
    assert len(policy.read) == 1
    (trajectory,) = session.trajectories(1.0)
    assert trajectory.episode and trajectory.episode.reward == 1.0 and trajectory.episode.failure is None
    assert len(trajectory.episode.turns) == 1


@pytest.mark.parametrize(
    "header",
    [
        {"Content_Type": "application/json; charset=none"},
        {"Content_Type": "text/html; charset=utf-16"},
        {"Content_Encoding": "gzip"},
        {"Authorization": "Bearer \xe9"},
        {"Authorization": "Basic x"},
    ],
)
def test_odd_headers_break_nothing(tiny: Path, header: dict[str, str]) -> None:
    async def play(url: str, key: str, session: Session) -> None:
        status, _ = await post(f"{url}/chat/completions", key, {"messages": ASKED}, **header)
        assert status < 500 and not session.broken.done()

    with_gateway(tiny, ["good"], play)


def test_huge_limits_are_those_of_the_recipe(tiny: Path) -> None:
    async def play(url: str, key: str, session: Session) -> None:
        body = {"messages": ASKED, "max_tokens": 10**30, "temperature": 1e300, "seed": -(10**30)}
        status, _ = await post(f"{url}/chat/completions", key, body)
        assert status == 200

    with_gateway(tiny, ["good"], play)


def test_a_reply_that_cannot_be_made_is_not_trained(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails behind the engine: the agent has not got the turn."""

    def fails(*_: Any) -> None:
        raise RuntimeError("a fault")

    async def play(url: str, key: str, session: Session) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("isotrain.environments.openai_messages._pieces", fails)
            body = {"messages": ASKED, "logprobs": True}
            status, reply = await post(f"{url}/chat/completions", key, body)
        assert status == 500 and "a fault" in reply["error"]["message"]
        assert (await post(f"{url}/chat/completions", key, {"messages": ASKED}))[0] == 200

    session, policy = with_gateway(tiny, ["unseen", "seen"], play)
    (trajectory,) = session.trajectories(None)
    assert policy.template.decode(trajectory.response_N.tolist()) == "seen<|im_end|>"
