"""What the trainer sees of an episode is what the engine was given and sampled, token by token."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from templates import TEMPLATES, tokenizer_with

from isotrain.data.trajectory import Trajectory, with_common_prompt
from isotrain.environments.episode import Episode, EpisodeLimits, EpisodeTask, play_tools
from isotrain.environments.interfaces import Factory, ToolEnvironment, load_environment
from isotrain.environments.template import TurnTemplate
from isotrain.environments.tool_calls import hermes

EPISODES = 1000
END = 2

SOURCE = '''
class Lookup:
    def reset(self, **row):
        self.calls = 0
        return row.get("hint")

    def find(self, key: str) -> str:
        """Looks something up.

        Args:
            key: What to look for.
        """
        self.calls += 1
        if key == "wrong":
            raise KeyError(key)
        return f" é {key} \\n"

    def get_reward(self) -> float:
        return float(self.calls)
'''


class Here:
    """An environment in this process."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    async def ask(self, request: str, **values: Any) -> dict[str, Any]:
        values.pop("seed", None)
        return self._environment.answer(request, values)  # type: ignore[no-any-return]


class Sampler:
    """Writes random tokens, calls of tools among them, and remembers what it was given and wrote."""

    def __init__(self, template: TurnTemplate, vocabulary: int, seed: int) -> None:
        self.template, self.vocabulary, self.draw = template, vocabulary, random.Random(seed)
        self.calls: list[tuple[list[int], list[int]]] = []

    async def __call__(self, tokens: Sequence[int], room: int, turn: int) -> Trajectory:
        await asyncio.sleep(0)
        written = self._words()[: room - 1]
        finished = len(written) < room and self.draw.random() < 0.97
        written = [*written, END] if finished else written or [5]
        self.calls.append((list(tokens), written))
        return Trajectory(
            row=0,
            prompt_index=0,
            sample=0,
            seed=0,
            prompt_length=len(tokens),
            tokens_T=np.array([*tokens, *written], np.int32),
            mask_N=np.ones(len(written), np.bool_),
            logp_N=np.array([-self.draw.random() for _ in written], np.float32),
            version_N=np.full(len(written), turn % 1000, np.int32),
            finished=finished,
        )

    def _words(self) -> list[int]:
        # Any bytes: also such as are no text, and pieces that an encoder would have put together.
        words = [self.draw.randrange(3, self.vocabulary) for _ in range(self.draw.randrange(8))]
        if self.draw.random() < 0.3:
            words = [*self.template.encode("<think>hm"), *words, *self.template.encode("</think>")]
        kind = self.draw.random()
        if kind < 0.6:
            key = self.draw.choice(["a b", "wrong", "ü", "1 2"])
            call = json.dumps({"name": "find", "arguments": {"key": key}})
            words += self.template.encode(f"<tool_call>{call}</tool_call>" * self.draw.choice([1, 1, 2]))
        elif kind < 0.7:
            words += self.template.encode('<tool_call>{"name": </tool_call>')
        return words


@cache
def lookup() -> tuple[Factory, dict[str, Any]]:
    return load_environment("lookup.py:Lookup", SOURCE)


def play(tiny: Path, name: str, number: int, history: str = "split") -> tuple[list[Trajectory], Sampler]:
    tokenizer = tokenizer_with(tiny / "model", name)
    template = TurnTemplate(tokenizer)
    factory, known = lookup()
    sampler = Sampler(template, len(tokenizer), number)
    row = {"hint": " (look it up)" if number % 2 else None}
    task = EpisodeTask(0, 7, number % 4, number, [{"role": "user", "content": "Wo?"}], row, None)
    limits = EpisodeLimits(6, turn=300, prompt=512, response=400, history=history, vocabulary=512)  # type: ignore[arg-type]
    environment = factory()
    assert isinstance(environment, ToolEnvironment)
    episode = Episode(task, template, Here(environment), sampler, limits)  # type: ignore[arg-type]
    reward = asyncio.run(play_tools(episode, known["tools"], hermes))
    return episode.trajectories(reward), sampler


def check(sequences: Sequence[Trajectory], sampler: Sampler) -> None:
    """Every call of the engine is in one of the sequences, and nothing else was written."""
    calls = iter(sampler.calls)
    for trajectory in sequences:
        assert trajectory.episode is not None
        written_N = np.zeros(len(trajectory.mask_N), np.bool_)
        for turn in trajectory.episode.turns:
            given, wrote = next(calls)
            start = trajectory.prompt_length + turn.start
            assert trajectory.tokens_T[:start].tolist() == given
            assert trajectory.response_N[turn.start : turn.end].tolist() == wrote
            written_N[turn.start : turn.end] = True
        assert (trajectory.mask_N == written_N).all()
        assert trajectory.mask_N[-1] and not trajectory.logp_N[~written_N].any()
    assert next(calls, None) is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_thousand_episodes(tiny: Path, name: str) -> None:
    several = inexact = turns = 0
    tokenizer = tokenizer_with(tiny / "model", name)
    for number in range(EPISODES):
        sequences, sampler = play(tiny, name, number)
        check(sequences, sampler)
        check(with_common_prompt(sequences), sampler)
        several += len(sequences) > 1
        turns += len(sampler.calls)
        for _, wrote in sampler.calls:
            text = tokenizer.decode(wrote)
            inexact += tokenizer(text, add_special_tokens=False)["input_ids"] != wrote
    # The test means something: there were many turns, and decoding and encoding would have changed tokens.
    assert turns > 2000 and inexact > 600
    # The strict one gets calls apart from words: what the policy wrote around them is rewritten.
    assert (several > 20) == (name in ("thinking", "strict")), several


def test_a_rewritten_history_is_a_sequence_of_its_own(tiny: Path) -> None:
    for number in range(40):
        sequences, _ = play(tiny, "thinking", number)
        for earlier, later in pairwise(sequences):
            assert "</think>" not in tokenizer_with(tiny / "model", "thinking").decode(
                later.tokens_T[: later.prompt_length]
            )
            assert earlier.episode and later.episode and later.episode.part == earlier.episode.part + 1
        extended, _ = play(tiny, "thinking", number, "extend")
        assert len(extended) == 1
        if len(sequences) > 1:
            return
    pytest.fail("no history was rewritten")
