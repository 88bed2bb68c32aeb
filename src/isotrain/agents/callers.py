"""Agents that call the policy themselves; they run in a process of their own for each episode."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isotrain import user_file
from isotrain.agents.interfaces import Factory, as_number
from isotrain.errors import EpisodeError

FIELD = "rollout.agent.path"
KNOWN = {"kind": "calls", "tools": []}
_GIVEN = ("base_url", "api_key", "row", "seed")


def load_function(path: str, source: str) -> tuple[Factory, dict[str, Any]]:
    """The function that `file.py:name` names."""
    file, found = user_file.load(path, source, "function", FIELD, EpisodeError)
    accepted = inspect.signature(found).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted)
    wanted = _GIVEN if takes_all else tuple(parameter.name for parameter in accepted)
    unknown = [each.name for each in accepted if each.name not in _GIVEN and each.default is each.empty]
    if unknown and not takes_all:
        raise EpisodeError(
            f"{file}: {path.rpartition(':')[2]} has a parameter {unknown[0]!r}; agents are given "
            f"{', '.join(_GIVEN)}"
        )
    return (lambda: _Function(found, [name for name in wanted if name in _GIVEN])), KNOWN


class _Function:
    def __init__(self, function: Callable[..., Any], wanted: Sequence[str]) -> None:
        self._function, self._wanted = function, wanted

    def answer(self, request: str, values: Mapping[str, Any]) -> dict[str, Any]:
        os.environ.update(variables(values))
        returned = self._function(**{name: values[name] for name in self._wanted})
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
        return {"reward": as_number(returned)}


async def _awaited(value: Any) -> Any:
    return await value


def load_program(command: Sequence[str]) -> tuple[Factory, dict[str, Any]]:
    return (lambda: _Program(command)), KNOWN


class _Program:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    def answer(self, request: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """It stays in the group of processes that ends with the episode."""
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
    """What OpenAI's clients read; the endpoint is on this machine, which no proxy can reach."""
    return {
        "OPENAI_BASE_URL": values["base_url"],
        "OPENAI_API_BASE": values["base_url"],
        "OPENAI_API_KEY": values["api_key"],
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
