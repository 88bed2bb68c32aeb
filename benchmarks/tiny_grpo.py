"""GRPO on the tiny task in one process: the reference engine samples, one rank learns. No Ray."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from isotrain.data.trajectory import Trajectory
from isotrain.engine.world import open_store
from isotrain.models.files import load_tokenizer
from isotrain.models.weights import shard_of
from isotrain.recipe.load import resolved
from isotrain.recipe.schema import Recipe
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.hf import HfEngine
from isotrain.trainers.online.messages import RankPlan, RankScores, RankStep, Totals
from isotrain.trainers.online.policy_rank import PolicyRank, StepReport

PROMPTS, RESPONSES, LENGTH = 8, 8, 12


def recipe_of(tiny: Path, sections: Mapping[str, Any]) -> Recipe:
    """`sections` have fields that are other than here."""
    return Recipe.model_validate(
        merged(
            {
                "name": "tiny",
                "output": str(tiny / "run"),
                "device": {"type": "cpu"},
                "model": {"path": str(tiny / "model"), "dtype": "float32"},
                "data": {"train": str(tiny / "prompts.jsonl"), "max_length": 64, "batch_size": PROMPTS},
                "algorithm": {"name": "grpo"},
                "rollout": {"engine": "hf", "n": RESPONSES, "max_tokens": LENGTH},
                "reward": {"function": {"path": f"{tiny / 'reward.py'}:score"}, "answer_key": "answer"},
                "optimizer": {"lr": 5e-3, "betas": [0.9, 0.95], "schedule": "constant", "warmup_ratio": 0.0},
                "observe": {"loggers": []},
            },
            sections,
        )
    )


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `values`, section by section."""
    result = dict(values)
    for name, change in changes.items():
        both = isinstance(change, Mapping) and isinstance(values.get(name), Mapping)
        result[name] = merged(values[name], change) if both else change
    return result


class TinyGrpo:
    def __init__(self, tiny: Path, recipe: Recipe) -> None:
        self.recipe, self.rank = recipe, PolicyRank(resolved(recipe))
        self.rank.start(open_store(None))
        self.rank.resume()
        model = tiny / "model"
        self.engine = HfEngine(
            model,
            name="engine",
            dtype=recipe.model.dtype,
            device=torch.device("cpu"),
            routes=recipe.algorithm.router_replay == "R3",  # type: ignore[union-attr]
        )
        self.tokenizer: Any = load_tokenizer(model)
        spec = importlib.util.spec_from_file_location("reward", tiny / "reward.py")
        assert spec is not None and spec.loader is not None
        self.reward: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.reward)
        self.rows = [json.loads(line) for line in (tiny / "prompts.jsonl").read_text().splitlines()]
        self.draw, self.step = np.random.default_rng(recipe.seed), 0
        self.gap: dict[str, float] = {}

    def sample(self) -> tuple[list[Trajectory], np.ndarray]:
        """Responses, group after group, and their scores."""
        rollout = self.recipe.rollout
        assert rollout is not None
        sampling = Sampling(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k)
        rows = self.draw.choice(len(self.rows), PROMPTS, replace=False)
        prompts = [
            self.tokenizer.apply_chat_template(
                self.rows[row]["prompt"], add_generation_prompt=True, return_dict=False
            )
            for row in rows
        ]
        requests = [
            Request(int(row), number, sample, int(self.draw.integers(1 << 31)), np.array(prompt, np.int32))
            for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
            for sample in range(RESPONSES)
        ]
        written = sorted(self.engine.generate(requests, sampling), key=lambda t: (t.prompt_index, t.sample))
        scores = [
            self.reward.score(
                self.tokenizer.decode(t.tokens_T[t.prompt_length :], skip_special_tokens=True),
                self.rows[t.row]["answer"],
            )
            for t in written
        ]
        return written, np.array(scores)

    def load(self, written: list[Trajectory]) -> None:
        numbers = list(range(len(written)))
        groups: Any = [(0, 0)]
        totals = [Totals(int(sum(t.mask_N.sum() for t in written)), len(written))]
        with patch("isotrain.trainers.online.policy_rank.fetch", lambda _: [tuple(written)]):
            self.rank.load(RankPlan(groups, [[numbers]], totals, share_prompts=False))

    def learn(self, scores: np.ndarray) -> StepReport:
        groups = scores.reshape(PROMPTS, RESPONSES)
        advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
        given = RankScores(
            dict(enumerate(scores.tolist())), dict(enumerate(advantages.ravel().tolist())), None, 0.0
        )
        lr = self.recipe.optimizer.lr
        return self.rank.learn(RankStep(given, lr, None, False, True, None))

    def train(self, change: Callable[[list[Trajectory]], list[Trajectory]] = list, **send: Any) -> np.ndarray:
        """A step, with `change` between engine and ranks; the scores."""
        written, scores = self.sample()
        self.load(change(written))
        self.gap = self.learn(scores).mismatch.metrics()
        self.send(**send)
        return scores

    @torch.no_grad()
    def send(self, stale: Collection[str] = ()) -> None:
        """The policy's weights to the engine, without the stale ones."""
        self.step += 1
        own, policy = dict(self.engine.model.named_parameters()), self.rank.policy
        for name, parameter in policy.parameters.items():
            if (target := name.removeprefix(policy.model.prefix)) in own and target not in stale:
                own[target].copy_(shard_of(parameter).local.detach())
        self.engine.version = self.step


@contextmanager
def tiny_grpo(tiny: Path, **sections: Any) -> Iterator[TinyGrpo]:
    run = TinyGrpo(tiny, recipe_of(tiny, sections))
    try:
        yield run
    finally:
        run.rank.close()
