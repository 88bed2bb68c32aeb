"""Environments of the package `verifiers`, by name; it runs in a Python that has the package.

Two interfaces exist. Up to 0.3, a package has `load_environment(**arguments)`, which returns an object with
data sets and rubrics. From 0.4 on, a package exports a `Taskset`, and `arguments` are the block `[env]` of
its configuration. A row carries its task as plain values, in the column `verifiers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO

from isotrain.environments.interfaces import AGENT, Factory, as_number, variables
from isotrain.errors import EpisodeError, IsotrainError
from isotrain.user_file import where

COLUMN = "verifiers"
SPLITS = ("train", "validation")
FIELD = "rollout.agent.verifiers"
# The prompt of a row whose task has none.
OPENS = "(the environment opens the conversation)"


class Loaded(Protocol):
    """An environment, whatever its interface."""

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """The tasks of `train` or `validation`, as rows for training."""

    async def play(self, task: Mapping[str, Any], base_url: str) -> Any:
        """One rollout of a row's task, with the key of OPENAI_API_KEY; returns its reward."""


def module_name(name: str) -> str:
    """The module of an environment's package: `owner/my-env@1.0` is imported as `my_env`."""
    return name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def check(name: str) -> None:
    """Raise `EpisodeError` where the package or the environment is missing; imports neither."""
    package = find_spec("verifiers")
    if package is None or package.origin is None:
        raise EpisodeError(
            f"{FIELD}: verifiers is not installed for {sys.executable}; install it there, or set "
            "rollout.agent.python to a Python that has it"
        )
    module = module_name(name)
    built_in = Path(package.origin).parent / "v1" / "tasksets" / module
    if not built_in.exists() and find_spec(module) is None:
        raise EpisodeError(
            f"{FIELD}: there is no environment {name!r} for {sys.executable}, which has no module {module}; "
            "install the environment's package there"
        )


def load(name: str, arguments: Mapping[str, Any]) -> Loaded:
    check(name)
    with contextlib.suppress(ImportError):
        # The first progress bar, such as of a data set, would start a thread that watches all bars.
        importlib.import_module("tqdm").tqdm.monitor_interval = 0
    old = getattr(importlib.import_module("verifiers"), "load_environment", None)
    module = importlib.import_module(module_name(name)) if find_spec(module_name(name)) else None
    if old is not None and hasattr(module, "load_environment"):
        return _Rubrics(name, old(name, **arguments))
    return _Tasks(name, arguments)


def load_rollouts(name: str, arguments: Mapping[str, Any]) -> tuple[Factory, dict[str, Any]]:
    """Loads once for all episodes, unless loading starts threads, with which no process may be forked."""
    check(name)
    if _starts_threads(name, arguments):
        return (lambda: _Rollout(load(name, arguments))), AGENT
    loaded = load(name, arguments)
    return (lambda: _Rollout(loaded)), AGENT


def _starts_threads(name: str, arguments: Mapping[str, Any]) -> bool:
    """Tried in a process of its own; where loading fails there, it fails here too, and is told here."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    code = 2
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(1, 2)
        loaded = load(name, arguments)
        code = int(threading.active_count() > 1)
        del loaded
    finally:
        os._exit(code)


class _Rollout:
    """One episode."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def answer(self, request: str, values: Mapping[str, Any]) -> dict[str, Any]:
        task = values["row"].get(COLUMN)
        if not isinstance(task, Mapping):
            raise EpisodeError(
                f"the row has no task in the column {COLUMN!r}: write the data with "
                "`isotrain prepare verifiers`"
            )
        os.environ.update(variables(values))
        return {"reward": as_number(asyncio.run(self._loaded.play(task, values["base_url"])))}


class _Tasks:
    """Environments of verifiers 0.4: tasks, which a harness plays."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._vf = vf = importlib.import_module("verifiers.v1")
        block = {**arguments, "taskset": {"id": name, **arguments.get("taskset", {})}}
        config = vf.resolve_env_config(json.loads(json.dumps(block)))
        roles = {role: value for role, value in config if isinstance(value, vf.AgentConfig)}
        calling = [role for role, value in roles.items() if value.client is None]
        if len(calling) != 1:
            raise EpisodeError(
                f"{FIELD}: {name} has the roles {', '.join(roles)}, and {len(calling)} of them call the "
                "policy; exactly one can be trained: give the others a client in rollout.agent.arguments"
            )
        self._role = calling[0]
        self._environment = vf.load_environment(config)
        self._task = type(self._environment.taskset).task_type()

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        if split != "train":  # other splits are an argument of the taskset
            return
        for task in self._environment.taskset:
            data = task.data.model_dump(mode="json")
            if self._rebuilt(data).data != task.data:
                raise EpisodeError(
                    f"{FIELD}: task {data.get('idx')} is not the same after it was written as JSON"
                )
            system = [{"role": "system", "content": data["system_prompt"]}] if data["system_prompt"] else []
            yield _row([*system, *_messages(data["prompt"])], data.get("answer"), data)

    def _rebuilt(self, data: Mapping[str, Any]) -> Any:
        """As the package's own server does it."""
        task = self._task.data_type().model_validate(data)
        return self._task(task, self._environment.config.taskset.task)

    async def play(self, task: Mapping[str, Any], base_url: str) -> Any:
        vf = self._vf
        client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
        async with self._environment.serving():
            (slot,) = self._environment.slots(self._rebuilt(task))
            episode = await self._environment.run_slot(slot, vf.ModelContext(model="policy", client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            problems = [f"{error.type}: {error.message}" for error in errors]
            raise RuntimeError(problems[-1] if problems else "the episode ended without a result")
        # A single agent has no name.
        traces = [trace for trace in episode.traces if trace.agent.name in (None, "", self._role)]
        if len(traces) != 1:
            raise RuntimeError(
                f"{len(traces)} rollouts of {self._role} in one episode; only one can be rewarded"
            )
        return traces[0].reward


class _Rubrics:
    """Environments of verifiers up to 0.3: a data set, whose rollouts a rubric scores."""

    def __init__(self, name: str, environment: Any) -> None:
        self._environment = environment
        if getattr(environment, "requires_group_rollouts", False):
            raise EpisodeError(
                f"{FIELD}: {name} has rewards that compare the rollouts of a group; each is scored alone here"
            )

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        environment = self._environment
        rows = environment.get_dataset() if split == "train" else _held_out(environment)
        for row in rows if rows is not None else ():
            task = {key: value for key, value in row.items() if value is not None}
            yield _row(_messages(task["prompt"]), task.get("answer"), task)

    async def play(self, task: Mapping[str, Any], base_url: str) -> Any:
        types = importlib.import_module("verifiers.types")
        # By default it tries ten times; the endpoint is on this machine, and what it refuses stays refused.
        client = types.ClientConfig(api_base_url=base_url, api_key_var="OPENAI_API_KEY", max_retries=0)
        output = await self._environment.run_rollout(dict(task), client, "policy", {})
        if error := output.get("error"):
            raise RuntimeError(_told(error))
        return output["reward"]


def _held_out(environment: Any) -> Iterable[Mapping[str, Any]] | None:
    """Its own tasks for evaluation: without any, it would return those for training."""
    build = getattr(environment, "build_eval_dataset", None)
    if build is not None:
        build()
    return environment.get_eval_dataset() if environment.eval_dataset is not None else None


def _told(error: Any) -> str:
    if isinstance(error, Mapping):
        return str(
            error.get("error_chain_repr") or error.get("error_chain_str") or error.get("error") or error
        )
    return str(error)


def _messages(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, str) or not prompt:
        return [{"role": "user", "content": prompt or OPENS}]
    return [{key: value for key, value in message.items() if value is not None} for message in prompt]


def _row(prompt: list[dict[str, Any]], answer: Any, task: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": prompt, "answer": "" if answer is None else answer, COLUMN: task}


def export(arguments: list[str]) -> None:
    """Write the tasks as rows; the only argument is JSON, `{name, arguments, limit, check}`.

    On standard output are lines of JSON: `{split, row}` for each task, `{refused: why}` where the environment
    cannot be loaded, and at the end `{done: true}`. With `check`, nothing is imported: only the packages are
    looked for."""
    asked = json.loads(arguments[0])
    # What packages print while they are loaded is no row.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    os.dup2(2, 1)
    try:
        check(asked["name"])
        if not asked.get("check"):
            _write_rows(asked, lines)
    except IsotrainError as error:
        _write(lines, {"refused": str(error)[:4000]})
    except Exception as error:  # of the environment's own code
        _write(lines, {"refused": f"rollout.agent.verifiers: {asked['name']}: {where(error)}"[:4000]})
    else:
        _write(lines, {"done": True})
    lines.flush()
    os._exit(0)  # whatever threads the environment has started


def _write_rows(asked: dict[str, Any], lines: TextIO) -> None:
    environment = load(asked["name"], asked["arguments"])
    for split in SPLITS:
        for row in itertools.islice(environment.rows(split), asked["limit"]):
            _write(lines, {"split": split, "row": row})


def _write(lines: TextIO, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    export(sys.argv[1:])
