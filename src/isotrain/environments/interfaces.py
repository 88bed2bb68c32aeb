"""Environments and agents as users have them, behind one interface; it runs in a process of each episode.

Environments answer the policy. Agents call it themselves.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol

from isotrain import user_file
from isotrain.errors import EpisodeError

ENVIRONMENT_FIELD = "rollout.environment.path"
AGENT_FIELD = "rollout.agent.path"
# Known of all agents, which are given these values.
AGENT = {"kind": "calls", "tools": []}
_GIVEN = ("base_url", "api_key", "row", "seed")

# Characters of what a tool returns: more than any model reads at once.
LONGEST_RESULT = 1 << 19


class Environment(Protocol):
    """The environment of one episode. Requests and replies are plain values, as JSON has them."""

    def answer(self, request: str, values: Mapping[str, Any]) -> dict[str, Any]: ...


Factory = Callable[[], Environment]


def load(
    section: str,
    path: str = "",
    source: str = "",
    command: Sequence[str] | None = None,
) -> tuple[Factory, dict[str, Any]]:
    """Load `rollout.environment` or `rollout.agent`, in the process that forks one for each episode."""
    if section == "environment":
        return load_environment(path, source)
    if command:
        return (lambda: _Program(command)), AGENT
    return load_function(path, source)


def load_environment(path: str, source: str) -> tuple[Factory, dict[str, Any]]:
    """Makes environments of the class that `file.py:Class` names, and what is known of all of them.

    OpenRLHF's agents have an async `reset`; that of TRL's environments is a plain method.
    """
    _provide_openrlhf()
    file, loaded = user_file.load(path, source, "class", ENVIRONMENT_FIELD, EpisodeError)
    name = path.rpartition(":")[2]
    agent = getattr(loaded, "agent_instance_cls", None) or _executed_class(loaded)
    if agent is not None:
        return (lambda: SteppedAgent(agent)), {"kind": "steps", "tools": []}
    reset = getattr(loaded, "reset", None)
    if not callable(reset):
        raise EpisodeError(f"{file}: {name} has no method reset")
    if inspect.iscoroutinefunction(reset):
        if not callable(getattr(loaded, "step", None)):
            raise EpisodeError(f"{file}: {name} has an async reset, as an agent, but no method step")
        return (lambda: SteppedAgent(loaded)), {"kind": "steps", "tools": []}
    tools = _schemas(loaded, file, name)
    return (lambda: ToolEnvironment(loaded)), {"kind": "tools", "tools": tools}


def _executed_class(executor: Any) -> Any:
    """The agent of OpenRLHF's `AgentExecutor`, which is made without arguments and names it."""
    if inspect.isclass(executor) and hasattr(executor, "execute") and not hasattr(executor, "reset"):
        return getattr(executor(), "agent_instance_cls", None)
    return None


def _tool_names(cls: Any) -> list[str]:
    """As TRL takes them: all public methods but these two."""
    names = [name for name, _ in inspect.getmembers(cls, predicate=inspect.isfunction)]
    return [name for name in names if not name.startswith("_") and name not in ("reset", "get_reward")]


def _schemas(cls: Any, file: Any, name: str) -> list[dict[str, Any]]:
    from transformers.utils.chat_template_utils import get_json_schema

    instance, schemas = cls(), []
    for tool in _tool_names(cls):
        try:
            schemas.append(get_json_schema(getattr(instance, tool)))
        except Exception as error:  # of several kinds, about docstrings and type hints
            line = getattr(getattr(cls, tool), "__code__", None)
            place = f"{file}:{line.co_firstlineno}" if line else str(file)
            raise EpisodeError(f"{place}: {name}.{tool} cannot be a tool: {error}") from None
    return schemas


class ToolEnvironment:
    """TRL's: `reset(**row)`, public methods as tools, and `get_reward()` if it gives one."""

    def __init__(self, cls: Any) -> None:
        self._instance = cls()
        self._tools = set(_tool_names(cls))
        self._loop = asyncio.new_event_loop()

    def answer(self, request: str, values: Mapping[str, Any]) -> dict[str, Any]:
        if request == "reset":
            observation = self._instance.reset(**values["row"])
            if observation is not None and not isinstance(observation, str):
                raise TypeError(f"reset returned a {type(observation).__name__}, not text or None")
            return {"observation": observation}
        if request == "call":
            return self._call(values["name"], values["arguments"])
        reward = getattr(self._instance, "get_reward", None)
        return {"reward": None if reward is None else as_number(_awaited(self._loop, reward()))}

    def _call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Errors are told to the policy, as TRL does: it can try again."""
        if name not in self._tools:
            return {"error": f"Tool {name} not found."}
        try:
            result = str(_awaited(self._loop, getattr(self._instance, name)(**arguments)))
        except Exception as error:
            return {"error": str(error)[:LONGEST_RESULT]}
        if len(result) > LONGEST_RESULT:
            return {"error": f"The result has {len(result)} characters; {LONGEST_RESULT} are allowed."}
        return {"result": result}


class SteppedAgent:
    """OpenRLHF's: `await reset(states)`, then `await step(states)` after each turn until it says done."""

    def __init__(self, cls: Any) -> None:
        self._instance = cls()
        self._loop = asyncio.new_event_loop()

    def answer(self, request: str, values: Mapping[str, Any]) -> dict[str, Any]:
        if request == "reset":
            reply = _awaited(self._loop, self._instance.reset({**values["states"]}))
            return {"observation": _text(reply["observation"], "observation")}
        reply = _awaited(self._loop, self._instance.step({**values["states"], "sampling_params": None}))
        return {
            "reward": as_number(reply["rewards"]),
            "feedback": _text(reply["environment_feedback"], "environment_feedback"),
            "done": bool(reply["done"]),
        }


def _awaited(loop: asyncio.AbstractEventLoop, value: Any) -> Any:
    return loop.run_until_complete(value) if inspect.isawaitable(value) else value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"'{what}' is a {type(value).__name__}, not text")
    if len(value) > LONGEST_RESULT:
        raise ValueError(f"'{what}' has {len(value)} characters; {LONGEST_RESULT} are allowed")
    return value


def as_number(value: Any) -> float | None:
    """Python's numbers, and tensors with one element."""
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}")
    return number


def as_tool_message(name: str, reply: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a tool for the policy; an error as TRL writes it."""
    content = reply["result"] if "result" in reply else str({"error": reply["error"]})
    return {"role": "tool", "name": name, "content": content}


def _provide_openrlhf() -> None:
    """The names that OpenRLHF's agent files import, where OpenRLHF itself is not installed."""
    if "openrlhf" in sys.modules or find_spec("openrlhf") is not None:
        return
    for name in ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent"):
        sys.modules.setdefault(name, ModuleType(name))
    module: Any = sys.modules["openrlhf.utils.agent"]
    module.AgentInstanceBase = type("AgentInstanceBase", (), {})
    module.AgentExecutorBase = type("AgentExecutorBase", (), {})
    module.MultiTurnAgentExecutor = _MultiTurnAgentExecutor


class _MultiTurnAgentExecutor:
    def __init__(self, agent_instance_cls: Any) -> None:
        self.agent_instance_cls = agent_instance_cls

    async def execute(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("isotrain calls reset and step of the agent itself")


def load_function(path: str, source: str) -> tuple[Factory, dict[str, Any]]:
    """The function that `file.py:name` names."""
    file, function = user_file.load(path, source, "function", AGENT_FIELD, EpisodeError)
    accepted = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted)
    names = _GIVEN if takes_all else tuple(parameter.name for parameter in accepted)
    unknown = [each.name for each in accepted if each.name not in _GIVEN and each.default is each.empty]
    if unknown and not takes_all:
        raise EpisodeError(
            f"{file}: {path.rpartition(':')[2]} has a parameter {unknown[0]!r}; agents are given "
            f"{', '.join(_GIVEN)}"
        )
    return (lambda: _Function(function, [name for name in names if name in _GIVEN])), AGENT


class _Function:
    def __init__(self, function: Callable[..., Any], parameters: Sequence[str]) -> None:
        self._function, self._parameters = function, parameters

    def answer(self, request: str, values: Mapping[str, Any]) -> dict[str, Any]:
        os.environ.update(variables(values))
        returned = self._function(**{name: values[name] for name in self._parameters})
        if inspect.isawaitable(returned):
            returned = asyncio.run(_value_of(returned))
        return {"reward": as_number(returned)}


async def _value_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


class _Program:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    def answer(self, request: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run the program for one episode, in the group of processes that ends with it."""
        ended = subprocess.run(
            self._command,
            input=json.dumps(values["row"]).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables(values)},
            check=False,
        )
        if ended.returncode:
            last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise RuntimeError(f"{self._command[0]} ended with code {ended.returncode}: {last[:500]}")
        return {"reward": None}


def variables(values: Mapping[str, Any]) -> dict[str, str]:
    """Variables of OpenAI's clients; the endpoint is on this machine, which no proxy can reach."""
    return {
        "OPENAI_BASE_URL": values["base_url"],
        "OPENAI_API_BASE": values["base_url"],
        "OPENAI_API_KEY": values["api_key"],
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
