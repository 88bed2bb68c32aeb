"""The environments in docs/agents.md, as they stand there."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from templates import tokenizer_with

from isotrain.data.trajectory import Trajectory
from isotrain.environments.episode import Episode, EpisodeLimits, EpisodeTask, play_steps, play_tools
from isotrain.environments.processes import EnvironmentProcesses
from isotrain.environments.template import TurnTemplate
from isotrain.environments.tool_calls import hermes

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
END = 2


def documented(name: str) -> str:
    (code,) = re.findall(rf"<!-- test: {name} -->\n+```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(code)


def play(
    tiny: Path,
    tmp_path: Path,
    name: str,
    cls: str,
    answer: str,
    sayings: Sequence[str],
    tokenizer: Any = None,
) -> tuple[list[Trajectory], str]:
    """An episode in which the policy says these things, with a real process; also all tokens as text."""
    tokenizer = tokenizer or tokenizer_with(tiny / "model", "chatml")
    template, said = TurnTemplate(tokenizer), iter(sayings)
    source = documented(name)
    loaded = {"section": "environment", "path": f"{tmp_path / 'env.py'}:{cls}", "source": source}
    processes = EnvironmentProcesses(loaded, time_limit=20.0, start_timeout=120.0)
    (tmp_path / "env.py").write_text(source)

    async def generate(tokens: Sequence[int], room: int, turn: int) -> Trajectory:
        wrote = [*template.encode(next(said)), END]
        ones = np.ones(len(wrote))
        whole = np.array([*tokens, *wrote], np.int32)
        return Trajectory(
            0, 0, 0, 0, len(tokens), whole, ones == 1, -ones.astype(np.float32), ones.astype(np.int32), True
        )

    async def run() -> list[Trajectory]:
        process = await processes.open()
        row = {"prompt": [{"role": "user", "content": "6 * 7?"}], "answer": answer}
        task = EpisodeTask(0, 0, 0, 5, row["prompt"], row, answer)  # type: ignore[arg-type]
        limits = EpisodeLimits(turns=4, turn=200, prompt=900, response=900, history="split", vocabulary=512)
        episode = Episode(task, template, process, generate, limits)
        known = processes.known
        if known["kind"] == "tools":
            reward = await play_tools(episode, known["tools"], hermes)
        else:
            reward = await play_steps(episode)
        processes.end(process)
        return episode.trajectories(reward)

    try:
        processes.start()
        found = asyncio.run(run())
    finally:
        processes.close()
    return found, template.decode(found[-1].tokens_T.tolist())


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_runs_a_trl_environment(tiny: Path, tmp_path: Path) -> None:
    says = [call("multiply", a=6, b=7), call("divide", a=1), call("submit", value="42"), "Done."]
    (trajectory,), text = play(tiny, tmp_path, "trl", "Calculator", "42", says)
    assert trajectory.episode is not None and trajectory.finished
    assert trajectory.episode.reward == 1.0 and trajectory.episode.failure is None
    assert [(turn.calls, turn.failures) for turn in trajectory.episode.turns] == [
        (1, 0),
        (1, 1),
        (1, 0),
        (0, 0),
    ]
    assert "<|im_start|>tool\n42<|im_end|>" in text
    assert "<|im_start|>tool\n{'error': 'Tool divide not found.'}<|im_end|>" in text
    assert "<|im_start|>tool\nThank you.<|im_end|>" in text
    assert '"name": "multiply"' in text.partition("<|im_start|>user")[0]


@pytest.mark.parametrize("cls", ["AgentInstance", "AgentExecutor"])
def test_runs_an_openrlhf_agent(tiny: Path, tmp_path: Path, cls: str) -> None:
    (trajectory,), text = play(tiny, tmp_path, "openrlhf", cls, "42", ["41", "It is 42"])
    assert trajectory.episode is not None and trajectory.finished
    assert trajectory.episode.reward == 1.0
    assert [turn.reward for turn in trajectory.episode.turns] == [0.0, 1.0]
    assert text.endswith("41<|im_end|>\n\nHuman: Try again.\n\nAssistant: It is 42<|im_end|>")
