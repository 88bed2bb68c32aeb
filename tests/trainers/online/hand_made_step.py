"""One step of the real online loop in this process, on trajectories made by hand.

T: tokens of a trajectory, N: its response tokens, P: those of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from formulas import Weights
from online_runs import online_recipe

from isotrain.data.trajectory import Trajectory
from isotrain.engine.engine import TrainingEngine, UpdateResult
from isotrain.engine.world import open_store
from isotrain.models.weights import shard_of
from isotrain.observe.console import Console
from isotrain.recipe.load import resolved
from isotrain.recipe.online import ClusterSection
from isotrain.recipe.schema import Recipe
from isotrain.trainers.build import open_prompts
from isotrain.trainers.job import Recorder, ResumeState
from isotrain.trainers.online.build import build_trainer
from isotrain.trainers.online.messages import Group, Responses, Score
from isotrain.trainers.online.policy_rank import Description, PolicyRank
from isotrain.trainers.online.rollouts import Batch, Seconds, SyncBatches
from isotrain.trainers.online.step import Micro
from isotrain.weights.send import Sent
from isotrain.weights.update import Routes

N_SAMPLES, MAX_TOKENS, LORA_ALPHA, LORA_RANK = 3, 10, 16, 4
PROMPTS = (5, 3, 8, 4)
# One response is empty, and the last was written by a tool from end to end.
RESPONSES = ((5, 1, 7), (3, 0, 10), (10, 4, 2), (6, 9, 3))
TOOLS = {(0, 2): slice(2, 5), (1, 2): slice(0, 2), (2, 0): slice(8, 10), (3, 2): slice(0, 3)}
# All responses to the third prompt are equally good.
SCORES = (0.0, 1.0, 0.25, 0.5, 0.0, 1.0, 0.75, 0.75, 0.75, 1.0, 0.0, 0.3)
GREEDY = (0.5, 0.25, 0.75, 0.1)


def _make_groups() -> list[tuple[Trajectory, ...]]:
    draw = np.random.default_rng(0)
    groups = []
    for prompt_index, (prompt, responses) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        prompt_P = draw.integers(3, 512, prompt)
        group = []
        for sample, length in enumerate(responses):
            mask_N = np.ones(length, np.bool_)
            mask_N[TOOLS.get((prompt_index, sample), slice(0, 0))] = False
            group.append(
                Trajectory(
                    row=prompt_index,
                    prompt_index=prompt_index,
                    sample=sample,
                    seed=0,
                    prompt_length=prompt,
                    tokens_T=np.concatenate([prompt_P, draw.integers(3, 512, length)]).astype(np.int32),
                    mask_N=mask_N,
                    logp_N=np.where(mask_N, draw.normal(-6.5, 0.5, length), 0.0).astype(np.float32),
                    version_N=np.zeros(length, np.int32),
                    finished=True,
                )
            )
        groups.append(tuple(group))
    return groups


GROUPS = _make_groups()
FLAT = [trajectory for group in GROUPS for trajectory in group]


def make_batch() -> Batch:
    groups = []
    for number, group in enumerate(GROUPS):
        counts = tuple(int(t.mask_N.sum()) for t in group)
        ended = (True,) * N_SAMPLES
        responses = Responses(number, number, PROMPTS[number], RESPONSES[number], counts, ended, 0, 0.0)
        own = SCORES[number * N_SAMPLES :][:N_SAMPLES]
        groups.append(Group(responses, number, tuple(Score(score, {}, None, "") for score in own), "test"))
    return Batch(groups, dict(enumerate(GREEDY)), len(GROUPS), Seconds(0.0, 0.0), 0)


def step_recipe(tiny: Path, output: Path, device_type: str, **sections: dict[str, Any]) -> Recipe:
    base: dict[str, dict[str, Any]] = {
        "data": {
            "train": str(tiny / "prompts.jsonl"),
            "batch_size": len(GROUPS),
            "max_length": 32,
            "too_long": "drop",
            "tokens_per_micro_batch": 512,
        },
        "rollout": {"engine": "hf", "n": N_SAMPLES, "max_tokens": MAX_TOKENS},
        "optimizer": {"lr": 1e-2, "schedule": "constant", "warmup_ratio": 0.0},
        "trainer": {"steps": 1},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return online_recipe(tiny, output, device_type, **base)


NOBODY = Routes("file", (), (0,), ("",))
"""Of weights, to no engine."""


class Here:
    """A group of one rank, in this process, which keeps what the rank forgets after the step."""

    # There are no engines to send weights to, and no second step to save for; the test closes the rank.
    not_done = ("send_weights", "save", "finish", "close")

    def __init__(self, rank: PolicyRank) -> None:
        self.rank = rank
        self.minis: list[list[Micro]] = []
        self.called: list[str] = []
        forget = rank.forget

        def keep() -> None:
            self.minis = rank.minis
            forget()

        rank.forget = keep  # type: ignore[method-assign]

    def __len__(self) -> int:
        return 1

    def within(self, timeout: float) -> Here:
        return self

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        self.called.append(method.__name__)
        if method.__name__ in self.not_done:
            return [Sent(logps=np.zeros(1, np.float32)) if method == PolicyRank.send_weights else None]
        return [method(self.rank, *args)]

    def call_each(self, method: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        return self.call(method, args[0])

    def call_on(self, index: int, method: Callable[..., Any], *args: Any) -> Any:
        return self.call(method, *args)[0]


@dataclass
class Step:
    """What a step left behind."""

    recipe: Recipe
    weights: Weights
    """The policy's before the step."""
    metrics: dict[str, float] = field(default_factory=dict)
    minis: list[list[Micro]] = field(default_factory=list)
    policy: list[tuple[Weights, UpdateResult]] = field(default_factory=list)
    """Each update, with the weights before it."""
    critic: list[tuple[Weights, UpdateResult]] = field(default_factory=list)
    next_kl_coefficient: float = 0.0
    called: list[str] = field(default_factory=list)
    """Methods of the ranks."""

    def found(self, name: str) -> list[torch.Tensor]:
        """A tensor of the micro-batches, cut into the step's trajectories."""
        parts: dict[int, torch.Tensor] = {}
        for micro in (micro for mini in self.minis for micro in mini):
            cut = getattr(micro, name).cpu().split(list(micro.batch.lengths))
            parts |= dict(zip(micro.batch.index, cut, strict=True))
        return [parts[number] for number in range(len(FLAT))]

    def numbers(self) -> list[list[int]]:
        """Trajectories of each mini-batch."""
        return [sorted(i for micro in mini for i in micro.batch.index) for mini in self.minis]


def take_step(recipe: Recipe, shaken: float = 0.02) -> Step:
    """`shaken` moves the policy away from the weights in its files, and so from its reference."""
    rank = PolicyRank(resolved(recipe))
    with pytest.MonkeyPatch.context() as patch:
        where = "isotrain.trainers.online.policy_rank.fetch"
        patch.setattr(where, lambda handles: [GROUPS[handle] for handle in handles])
        try:
            described = rank.start(open_store(None))
            rank.resume()
            _shake(rank.policy, shaken)
            return _train(recipe, rank, described)
        finally:
            rank.close()


def _train(recipe: Recipe, rank: PolicyRank, described: Description) -> Step:
    step, here, recorder = Step(recipe, weights_of(rank.policy)), Here(rank), Recorder(Console())
    _watch(rank.policy, step.policy)
    if rank.models.critic is not None:
        _watch(rank.models.critic, step.critic)
    groups: Any = SimpleNamespace(
        ranks=here, engines=[], relays=[], rewards=[], queue=[], colocated=False, routes=[NOBODY]
    )
    recorder.loggers = [SimpleNamespace(write=lambda number, values: step.metrics.update(values))]
    trainer = build_trainer(
        recipe, ClusterSection(), open_prompts(recipe), groups, described, recorder, ResumeState(0, {}, [])
    )
    trainer.batches = SyncBatches(lambda: lambda next_may_begin: make_batch())
    trainer.train(0)
    step.minis, step.next_kl_coefficient = here.minis, trainer.progress.kl.coefficient
    step.called = here.called
    return step


def weights_of(engine: TrainingEngine) -> Weights:
    """As Hugging Face names them, with adapters merged."""
    named = {
        name.removeprefix(engine.model.prefix): shard_of(p).local.detach().cpu().clone()
        for name, p in engine.parameters.items()
    }
    whole = {name.replace(".base_layer.", "."): t for name, t in named.items() if ".lora_" not in name}
    for name, down in named.items():
        if ".lora_A." in name:
            up = named[name.replace(".lora_A.", ".lora_B.")]
            whole[name.replace(".lora_A.default.", ".")] += LORA_ALPHA / LORA_RANK * (up @ down)
    return whole


def _watch(engine: TrainingEngine, seen: list[tuple[Weights, UpdateResult]]) -> None:
    update = engine.update

    def watched(work: Any, lr: float) -> UpdateResult:
        before = weights_of(engine)
        seen.append((before, update(work, lr)))
        return seen[-1][1]

    patched: Any = engine
    patched.update = watched


def _shake(engine: TrainingEngine, width: float) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in engine.trained.values():
            local = shard_of(parameter).local
            local.add_((torch.randn(local.shape, generator=generator) * width).to(local.device))
