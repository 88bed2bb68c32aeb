"""Episodes whose tools are slow: turns that overlap against turns in rounds. Lower is better.

`--episodes` are in flight at once on one engine, with `--turns` turns of `--tokens` tokens at most. After
each turn a tool takes 0.1 to 5 s. Overlapped, as isotrain plays them, a turn begins as soon as its tool has
answered. In rounds, as loops over batches play them, a round of turns begins when all tools have answered.
Both ways alternate, with the same seeds; `ratio` is the median over pairs of the time overlapped over that in
rounds. `idle` is the share of the time in which the engine had nothing to generate. `--model tiny` has a CPU
generate as fast, beside its tools, as an accelerator generates with a model of usual size.

    python benchmarks/episodes.py [--pairs 3] [--episodes 256] [--turns 4] [--tokens 32] [--model smollm2]
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench
from smollm2 import smollm2

from isotrain.data.prepare.tiny import make_tiny
from isotrain.data.trajectory import Trajectory
from isotrain.device.detect import choose_device
from isotrain.environments.episode import EpisodeTask, Generate
from isotrain.environments.players import Player
from isotrain.environments.processes import EnvironmentProcess
from isotrain.recipe.schema import Recipe
from isotrain.rollout.base import More, Request, RolloutEngine, Sampling, no_more
from isotrain.rollout.build import build_rollout
from isotrain.trainers.online.engine_loop import EngineLoop
from isotrain.trainers.online.episodes import Episodes
from isotrain.trainers.online.messages import PromptRequest
from isotrain.trainers.online.prompt_queue import Supply

GOAL = 0.9
N = 4
# For the tokens of a tool's answer.
ROOM = 32
TOOL = """
import random, time

class Slow:
    async def reset(self, states):
        self.left = int(states["label"])
        return {"observation": states["observation"]}

    async def step(self, states):
        self.left -= 1
        time.sleep(random.uniform(0.1, 5.0))
        return {"rewards": 0.0, "environment_feedback": "\\nTool: nothing yet.\\n", "done": self.left == 0}
"""


class Timed:
    """An engine, and the time in which it had something to do."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine, self.busy = engine, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, more: More = no_more
    ) -> Iterator[Trajectory]:
        begun = time.perf_counter()
        try:
            yield from self._engine.generate(requests, sampling, more)
        finally:
            self.busy += time.perf_counter() - begun


class InRounds:
    """Has the turns of all episodes wait for each other."""

    def __init__(self, player: Player, episodes: int) -> None:
        self._player, self._live = player, episodes
        self._waiting: list[asyncio.Future[None]] = []

    async def play(
        self, process: EnvironmentProcess, task: EpisodeTask, generate: Generate
    ) -> list[Trajectory]:
        async def together(tokens: Sequence[int], room: int, turn: int) -> Trajectory:
            here = asyncio.get_running_loop().create_future()
            self._waiting.append(here)
            self._begin_if_all()
            await here
            return await generate(tokens, room, turn)

        try:
            return await self._player.play(process, task, together)
        finally:
            self._live -= 1
            self._begin_if_all()

    def _begin_if_all(self) -> None:
        if len(self._waiting) == self._live:
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                one.set_result(None)


def model_and_prompts(options: Any, folder: Path) -> tuple[Path, list[Any]]:
    groups = options.episodes // N
    if options.model == "tiny":
        make_tiny(folder / "tiny", train_rows=max(10, groups))
        rows = (folder / "tiny" / "prompts.jsonl").read_text().splitlines()[:groups]
        return folder / "tiny" / "model", [json.loads(row)["prompt"] for row in rows]
    rows = (bench.gsm8k() / "train.jsonl").read_text().splitlines()[:groups]
    return smollm2(), [json.loads(row)["question"][:400] for row in rows]


def recipe_of(options: Any, folder: Path, model: Path) -> Recipe:
    (folder / "tool.py").write_text(TOOL)
    total = options.turns * (options.tokens + ROOM)
    return Recipe.model_validate(
        {
            "name": "episodes",
            "output": str(folder / "run"),
            "model": {"path": str(model), "dtype": bench.DTYPE},
            "data": {"train": "rows.jsonl", "max_length": 256, "tokens_per_micro_batch": 256 + total},
            "device": {"type": "cpu"},
            "algorithm": {"name": "grpo"},
            "rollout": {
                "engine": options.engine,
                "n": N,
                "max_tokens": total,
                "environment": {
                    "path": f"{folder}/tool.py:Slow",
                    "max_turns": options.turns,
                    "max_turn_tokens": options.tokens,
                    "concurrency": options.episodes,
                },
            },
            "reward": {"environment": {}, "answer_key": "turns"},
        }
    )


def played(episodes: Episodes, engine: Timed, options: Any, questions: Sequence[Any]) -> dict[str, float]:
    """Seconds, the share of them in which the engine was idle, and tokens that it generated."""
    draws = [PromptRequest(number, number) for number in range(options.episodes // N)]
    sampling = Sampling(options.turns * (options.tokens + ROOM))

    def row(number: int) -> dict[str, Any]:
        return {"prompt": questions[number % len(questions)], "turns": str(options.turns)}

    busy, begun, tokens = engine.busy, time.perf_counter(), 0
    supply = Supply(draws, len(draws), gradual=True)
    for group in episodes.generate(supply, row, N, sampling, 0, urgent=False):
        tokens += sum(int(trajectory.mask_N.sum()) for trajectory in group)
        for trajectory in group:
            assert trajectory.episode is not None and trajectory.episode.failure is None, trajectory.episode
    took = time.perf_counter() - begun
    return {"seconds": took, "idle": 1 - (engine.busy - busy) / took, "tokens": tokens}


def main() -> None:
    parser = bench.Options(__doc__, pairs=1, episodes=32, tokens=8, model="tiny")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--engine", default="vllm", choices=["vllm", "hf"])
    parser.add_argument("--model", default="smollm2", choices=["smollm2", "tiny"])
    options = parser.read()
    with tempfile.TemporaryDirectory() as folder:
        model, questions = model_and_prompts(options, Path(folder))
        recipe = recipe_of(options, Path(folder), model)
        assert recipe.rollout is not None

        def build() -> RolloutEngine:
            assert recipe.rollout is not None
            engine = build_rollout(
                recipe.rollout,
                recipe.model.path,
                recipe.model.dtype,
                device=choose_device("cpu"),
                max_prompt=recipe.data.max_length,
                seed=recipe.seed,
                name="engine 1",
            )
            # vLLM waits for its first update; random weights generate as fast as others.
            vars(engine)["_unusable"] = ""
            return Timed(engine)

        loop = EngineLoop(build)
        episodes = Episodes(recipe, TOOL, loop)
        try:
            compare(episodes, loop.engine, options, questions)  # type: ignore[arg-type]
        finally:
            episodes.close()
            loop.close()


def compare(episodes: Episodes, engine: Timed, options: Any, questions: Sequence[Any]) -> None:
    overlapped, found = episodes._player, {"overlapped": [], "in rounds": []}  # type: ignore[var-annotated]
    for pair in range(options.pairs):
        for way in sorted(found, reverse=bool(pair % 2)):
            episodes._player = (
                overlapped if way == "overlapped" else InRounds(overlapped, options.episodes)  # type: ignore[assignment]
            )
            found[way].append(played(episodes, engine, options, questions))
        pairs = zip(found["overlapped"], found["in rounds"], strict=True)
        ratios = bench.spread([one["seconds"] / other["seconds"] for one, other in pairs])
        bench.report(
            "episodes",
            ratios["median"],
            goal=GOAL,
            met=ratios["median"] <= GOAL,
            ratios=ratios,
            episodes=options.episodes,
            model=options.model,
            engine_at_once=engine.at_once,
            **{
                f"{what}_{way.replace(' ', '_')}": bench.spread([one[what] for one in found[way]])
                for way in found
                for what in ("seconds", "idle", "tokens")
            },
        )


if __name__ == "__main__":
    main()
