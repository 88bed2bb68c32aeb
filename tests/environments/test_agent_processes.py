"""Agents in processes of their own, in the languages and frameworks that people have them in."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from templates import tokenizer_with
from test_documented_environments import documented
from test_gateway import CALL, TASK, Policy, limits

from isotrain.data.trajectory import Trajectory
from isotrain.environments.gateway import Gateway
from isotrain.environments.players import AgentPlayer
from isotrain.environments.processes import EnvironmentProcesses
from isotrain.environments.template import TurnTemplate
from isotrain.environments.tool_calls import hermes
from isotrain.errors import EpisodeError, RolloutError
from support import python_of


def played(
    tiny: Path,
    tmp_path: Path,
    sayings: Sequence[str],
    source: str = "",
    time_limit: float = 30.0,
    python: str | None = None,
    **loaded: Any,
) -> tuple[list[Trajectory], Policy]:
    if source:
        (tmp_path / "agent.py").write_text(source)
        loaded |= {"path": f"{tmp_path / 'agent.py'}:run", "source": source, "command": None}
    processes = EnvironmentProcesses(
        {"section": "agent", **loaded}, time_limit=time_limit, start_timeout=120.0, python=python
    )
    template = TurnTemplate(tokenizer_with(tiny / "model", "chatml"))
    policy = Policy(template, sayings)

    async def play() -> list[Trajectory]:
        player = AgentPlayer(Gateway(), template, limits(), lambda tools: hermes)
        await player.start()
        process = await processes.open()
        try:
            return await player.play(process, TASK, policy)
        finally:
            processes.end(process)
            await player.close()

    try:
        processes.start()
        return asyncio.run(play()), policy
    finally:
        processes.close()


ASYNC = """
from openai import AsyncOpenAI

async def run(base_url, api_key, row):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": row["question"]}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        messages += [reply.choices[0].message, {"role": "user", "content": "Sure?"}]
    return float(row["answer"] in reply.choices[0].message.content)
"""


def test_runs_an_async_function(tiny: Path, tmp_path: Path) -> None:
    (trajectory,), _ = played(tiny, tmp_path, ["b", "a"], ASYNC)
    assert trajectory.episode and trajectory.episode.reward == 1.0 and trajectory.finished
    assert len(trajectory.episode.turns) == 2 and trajectory.episode.turns[0].seconds > 0


PLAIN = """
from openai import OpenAI

def run(row, **others):
    messages = [{"role": "user", "content": row["question"]}]
    reply = OpenAI().chat.completions.create(model="m", messages=messages)
    return len(reply.choices[0].message.content)
"""


def test_a_plain_function_finds_the_endpoint_by_itself(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody is there
    (trajectory,), _ = played(tiny, tmp_path, ["four"], PLAIN)
    assert trajectory.episode and trajectory.episode.reward == 4.0, trajectory.episode


def test_the_documented_function(tiny: Path, tmp_path: Path) -> None:
    (trajectory,), policy = played(tiny, tmp_path, ["b", "It is a"], documented("openai"))
    assert trajectory.episode and trajectory.episode.reward == 1.0
    assert "Try again." in policy.read[1]


def test_the_documented_program_in_another_process(tiny: Path, tmp_path: Path) -> None:
    chatter = "print('chatter ' * 100000)\n"  # nobody reads it
    (tmp_path / "program.py").write_text(chatter + documented("program"))
    command = [sys.executable, str(tmp_path / "program.py")]
    (trajectory,), _ = played(tiny, tmp_path, ["a"], command=command)
    assert trajectory.episode and trajectory.episode.reward == 1.0 and trajectory.episode.failure is None


@pytest.mark.parametrize(
    ("body", "failure", "detail"),
    [
        ("raise ValueError('enough')", "error", "agent.py:3: ValueError: enough"),
        ("import os; os._exit(3)", "crash", "its process ended"),
        ("import time; time.sleep(60)", "timeout", "no reply to 'run' after 2 s"),
        ("return 'much'", "error", "could not convert"),
        ("return float('nan')", "error", "the reward is nan"),
    ],
)
def test_agents_that_fail(tiny: Path, tmp_path: Path, body: str, failure: str, detail: str) -> None:
    source = f"def run(base_url, api_key, row):\n    if True:\n        {body}\n"
    (trajectory,), _ = played(tiny, tmp_path, [], source, time_limit=2.0)
    assert trajectory.episode and trajectory.episode.failure == failure
    assert detail in trajectory.episode.detail


def test_a_program_that_fails(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no luck')"]
    (trajectory,), _ = played(tiny, tmp_path, [], command=command)
    assert trajectory.episode and "ended with code 1: no luck" in trajectory.episode.detail


def test_the_end_of_the_engine_ends_all(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="the engine has ended"):
        played(tiny, tmp_path, [], ASYNC)


def test_refuses_a_function_with_other_parameters(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match="parameter 'question'; agents are given base_url, api_key, row"):
        played(tiny, tmp_path, [], "def run(question): pass\n")


LITELLM = """
import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}

async def run(base_url, api_key, row):
    settings = {"model": "openai/policy", "api_base": base_url, "api_key": api_key, "tools": [TOOL]}
    messages = [{"role": "user", "content": row["question"]}]
    first = await litellm.acompletion(messages=messages, **settings)
    said = first.choices[0].message
    answer = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "here"}
    messages += [said.model_dump(), answer]
    second = await litellm.acompletion(messages=messages, stream=True, **settings)
    parts = [chunk.choices[0].delta.content or "" async for chunk in second]
    return float("".join(parts) == "It is here.")
"""

LANGCHAIN = '''
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

@tool
def find(key: str) -> str:
    """Looks something up."""
    return f"here: {key}"

async def run(base_url, api_key, row):
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key).bind_tools([find])
    messages = [HumanMessage(row["question"])]
    first = await model.ainvoke(messages)
    (call,) = first.tool_calls
    messages += [first, ToolMessage(find.invoke(call["args"]), tool_call_id=call["id"])]
    second = await model.ainvoke(messages)
    return float(second.content == "It is here.")
'''


@pytest.mark.slow
@pytest.mark.parametrize("source", [LITELLM, LANGCHAIN], ids=["litellm", "langchain"])
def test_frameworks_in_another_environment(tiny: Path, tmp_path: Path, source: str) -> None:
    says, python = [CALL, "It is here."], python_of("agents")
    (trajectory,), policy = played(tiny, tmp_path, says, source, time_limit=60.0, python=python)
    assert trajectory.episode and trajectory.episode.failure is None, trajectory.episode
    assert trajectory.episode.reward == 1.0
    # One sequence: what the framework sent back is what the policy had written.
    assert len(trajectory.episode.turns) == 2 and policy.read[1].startswith(policy.read[0] + CALL)
