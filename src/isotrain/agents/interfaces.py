"""Environments as users have them, behind one interface; it runs in the environment's own process."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol

from isotrain import user_file
from isotrain.errors import EpisodeError

FIELD = "rollout.environment.path"

# Characters of what a tool returns: more than any model reads at once.
LONGEST_RESULT = 1 << 19


class Environment(Protocol):
    """Of one episode. Requests and replies are plain values, as JSON has them."""

    def answer(self, request: str, values: Mapping[str, Any]) -> dict[str, Any]: ...


Factory = Callable[[], Environment]


def load_environment(path: str, source: str) -> tuple[Factory, dict[str, Any]]:
    """Makes environments of the class that `file.py:Class` names, and what is known of all of them.

    OpenRLHF's agents have an async `reset`; that of TRL's environments is a plain method.
    """
    _provide_openrlhf()
    file, found = user_file.load(path, source, "class", FIELD, EpisodeError)
    name = path.rpartition(":")[2]
    agent = getattr(found, "agent_instance_cls", None) or _executed_class(found)
    if agent is not None:
        return (lambda: SteppedAgent(agent)), {"kind": "steps", "tools": []}
    reset = getattr(found, "reset", None)
    if not callable(reset):
        raise EpisodeError(f"{file}: {name} has no method reset")
    if inspect.iscoroutinefunction(reset):
        if not callable(getattr(found, "step", None)):
            raise EpisodeError(f"{file}: {name} has an async reset, as an agent, but no method step")
        return (lambda: SteppedAgent(found)), {"kind": "steps", "tools": []}
    tools = _schemas(found, file, name)
    return (lambda: ToolEnvironment(found)), {"kind": "tools", "tools": tools}


def _executed_class(found: Any) -> Any:
    """The agent of OpenRLHF's `AgentExecutor`, which is made without arguments and names it."""
    if inspect.isclass(found) and hasattr(found, "execute") and not hasattr(found, "reset"):
        return getattr(found(), "agent_instance_cls", None)
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
        return {"reward": None if reward is None else as_number(self._awaited(reward()))}

    def _call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Errors are told to the policy, as TRL does: it can try again."""
        if name not in self._tools:
            return {"error": f"Tool {name} not found."}
        try:
            result = str(self._awaited(getattr(self._instance, name)(**arguments)))
        except Exception as error:
            return {"error": str(error)[:LONGEST_RESULT]}
        if len(result) > LONGEST_RESULT:
            return {"error": f"The result has {len(result)} characters; {LONGEST_RESULT} are allowed."}
        return {"result": result}

    def _awaited(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value


class SteppedAgent:
    """OpenRLHF's: `await reset(states)`, then `await step(states)` after each turn until it says done."""

    def __init__(self, cls: Any) -> None:
        self._instance = cls()
        self._loop = asyncio.new_event_loop()

    def answer(self, request: str, values: Mapping[str, Any]) -> dict[str, Any]:
        if request == "reset":
            told = self._awaited(self._instance.reset({**values["states"]}))
            return {"observation": _text(told["observation"], "observation")}
        told = self._awaited(self._instance.step({**values["states"], "sampling_params": None}))
        return {
            "reward": as_number(told["rewards"]),
            "feedback": _text(told["environment_feedback"], "environment_feedback"),
            "done": bool(told["done"]),
        }

    def _awaited(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value


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
    """What the policy reads; an error as TRL writes it."""
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
