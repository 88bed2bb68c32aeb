"""Environments of verifiers 0.4 in a Python of their own, from their tasks to the rewards of episodes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from templates import tokenizer_with
from test_documented_environments import PAGE
from test_gateway import TASK, Policy, limits

from isotrain.data.prepare.verifiers_tasks import find_environment, prepare_verifiers, read_arguments
from isotrain.data.trajectory import Trajectory
from isotrain.environments import verifiers_environments
from isotrain.environments.gateway import Gateway
from isotrain.environments.players import AgentPlayer
from isotrain.environments.processes import EnvironmentProcesses
from isotrain.environments.template import TurnTemplate
from isotrain.environments.tool_calls import hermes
from isotrain.environments.verifiers_environments import load_rollouts, module_name
from isotrain.errors import DataError, EpisodeError
from isotrain.recipe.environment import AgentSection
from support import python_of, run_cli

PACKAGE = str(Path(__file__).parent / "verifiers_package")
LOCAL: dict[str, Any] = {"agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> str:
    """Of an environment that has verifiers, and these tests' environments as well."""
    found = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [PACKAGE, found])))
    return python_of("agents")


def play(
    tiny: Path,
    python: str,
    name: str,
    arguments: dict[str, Any],
    episodes: Sequence[tuple[dict[str, Any], Sequence[str]]],
) -> list[tuple[Trajectory, Policy]]:
    """One sequence of each episode: rows, and what the policy says."""
    processes = EnvironmentProcesses(
        {"section": "agent", "verifiers": name, "arguments": arguments},
        time_limit=300.0,
        start_timeout=600.0,
        python=python,
    )
    template = TurnTemplate(tokenizer_with(tiny / "model", "chatml"))

    async def all_of_them() -> list[tuple[Trajectory, Policy]]:
        player = AgentPlayer(Gateway(), template, limits(), lambda tools: hermes)
        await player.start()
        found = []
        for row, sayings in episodes:
            policy = Policy(template, sayings)
            process = await processes.open()
            (trajectory,) = await player.play(process, replace(TASK, values=row), policy)
            processes.end(process)
            found.append((trajectory, policy))
        await player.close()
        return found

    try:
        processes.start()
        return asyncio.run(all_of_them())
    finally:
        processes.close()


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_letters(tiny: Path, tmp_path: Path, python: str, name: str, arguments: dict[str, Any]) -> None:
    written = prepare_verifiers(name, tmp_path, arguments=arguments, python=python)
    assert written["train.jsonl"] == 4
    digits, capitals = rows_of(tmp_path / "train.jsonl")[:2]
    assert digits["prompt"] == [{"role": "user", "content": "Say digits"}] and digits["answer"] == "digits"
    episodes = [(digits, ["x", "12a4"]), (capitals, ["x", "AB"])]
    (first, policy), (second, _) = play(tiny, python, name, arguments, episodes)
    for trajectory, reward, said in ((first, 2.0, "12a4"), (second, 2.5, "AB")):
        episode = trajectory.episode
        assert episode and episode.failure is None, episode
        assert episode.reward == reward and len(episode.turns) == 2
        template = policy.template
        turns = [trajectory.tokens_T[trajectory.prompt_length :][t.start : t.end] for t in episode.turns]
        assert [template.decode(turn[:-1]) for turn in turns] == ["x", said]
        wrote = sum(len(turn) for turn in turns)
        assert trajectory.mask_N.sum() == wrote < len(trajectory.mask_N)
    assert policy.read[1].startswith(policy.read[0] + "x") and "Again" in policy.read[1]


@pytest.mark.slow
def test_tasks_are_played_and_rewarded(tiny: Path, tmp_path: Path, python: str) -> None:
    check_letters(tiny, tmp_path, python, "letters", LOCAL)


@pytest.mark.slow
def test_runs_environments_written_before_0_4(tiny: Path, tmp_path: Path, python: str) -> None:
    old = os.environ.get("ISOTRAIN_OLD_VERIFIERS_PYTHON")
    if not old:
        pytest.skip("set ISOTRAIN_OLD_VERIFIERS_PYTHON to a Python with verifiers 0.1.14 and isotrain")
    check_letters(tiny, tmp_path, old, "letters-old", {"tasks": 4})
    assert len(rows_of(tmp_path / "validation.jsonl")) == 1
    with pytest.raises(EpisodeError, match="rewards that compare the rollouts of a group"):
        play(tiny, old, "letters-old", {"compared": True}, [])


@pytest.mark.slow
def test_failures_of_the_environment_cost_an_episode(tiny: Path, tmp_path: Path, python: str) -> None:
    prepare_verifiers("letters", tmp_path, arguments=LOCAL, python=python)
    row, *_ = rows_of(tmp_path / "train.jsonl")
    broken = {"agent": {**LOCAL["agent"], "harness": {"id": "letters", "broken": True}}}
    other = {key: value for key, value in row.items() if key != "verifiers"}
    (failed, _), (without, _) = play(tiny, python, "letters", broken, [(row, []), (other, [])])
    assert failed.episode and failed.episode.failure == "error"
    assert "HarnessError: harness 'letters' exited 3: out of letters" in failed.episode.detail
    assert without.episode and "isotrain prepare verifiers" in without.episode.detail
    with pytest.raises(EpisodeError, match="Extra inputs are not permitted"):
        play(tiny, python, "letters", {"taskset": {"taks": 3}}, [])


@pytest.mark.slow
def test_the_documented_commands(tiny: Path, tmp_path: Path, python: str) -> None:
    """As they stand in docs/agents.md, but for the names of the environment and of directories."""
    page = PAGE.read_text()
    (shell,) = re.findall(r"<!-- test: verifiers-prepare -->\n```bash\n(.*?)```", page, re.DOTALL)
    (block,) = re.findall(r"<!-- test: verifiers-recipe -->\n```yaml\n(.*?)```", page, re.DOTALL)
    (line,) = [each for each in shell.replace("\\\n", " ").splitlines() if "isotrain prepare" in each]
    _, *words = shlex.split(line)
    known = {"my-env": "letters", "work/my-env": str(tmp_path), ".venv-agents/bin/python": python}
    printed = run_cli(*(known.get(word, word) for word in words)).stdout
    assert "train.jsonl (3 rows)" in printed and "validation.jsonl (1 rows)" in printed
    told = AgentSection.model_validate(
        yaml.safe_load(printed.partition("recipe for online training:")[2])["rollout"]["agent"]
    )
    shown = AgentSection.model_validate(yaml.safe_load(block)["rollout"]["agent"])
    assert told.arguments == shown.arguments and shown.verifiers == "my-env"
    row, *_ = rows_of(tmp_path / "train.jsonl")
    ((trajectory, _),) = play(tiny, python, "letters", told.arguments, [(row, ["1", "2"])])
    assert trajectory.episode and trajectory.episode.reward == 2.5, trajectory.episode


@pytest.mark.slow
def test_refuses_an_unknown_environment(python: str) -> None:
    find_environment("letters", python)
    with pytest.raises(DataError, match=r"no environment 'no/such-one' .* no module such_one"):
        find_environment("no/such-one", python)


def test_refuses_a_python_without_the_package() -> None:
    with pytest.raises(DataError, match=r"rollout\.agent\.verifiers: verifiers is not installed for "):
        find_environment("letters", None)
    with pytest.raises(DataError, match="there is no Python 'nowhere'"):
        find_environment("letters", "nowhere")


def test_names_of_the_hub() -> None:
    assert module_name("owner/My-env@0.1.2") == "my_env"


def test_reads_arguments_of_the_command_line() -> None:
    assert read_arguments(["a.b=1", "a.c=[x]", "d='null'"]) == {"a": {"b": 1, "c": ["x"]}, "d": "null"}
    for wrong in ("a", "=1", "a..b=1", "a=["):
        with pytest.raises(DataError, match="--arg"):
            read_arguments([wrong])
    with pytest.raises(DataError, match="already has a value"):
        read_arguments(["a=1", "a.b=2"])


@pytest.mark.parametrize("threads", [False, True])
def test_no_process_is_forked_from_one_with_threads(monkeypatch: pytest.MonkeyPatch, threads: bool) -> None:
    """An environment that starts threads when it is loaded is loaded in each episode's process."""
    loads = []

    def load(name: str, arguments: Any) -> Any:
        loads.append(name)
        if threads:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        return SimpleNamespace()

    monkeypatch.setattr(verifiers_environments, "check", lambda name: None)
    monkeypatch.setattr(verifiers_environments, "load", load)
    load_rollouts("letters", {})
    assert loads == ([] if threads else ["letters"])
