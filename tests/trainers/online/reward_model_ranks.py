"""Reward models over unequal shares of trajectories, as each rank of a job scores them.

T: tokens, N: response tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isotrain.data.packing import PackedBatch
from isotrain.data.trajectory import Trajectory
from isotrain.device.detect import choose_device
from isotrain.engine.world import join_world
from isotrain.recipe.online import RewardSection
from isotrain.recipe.schema import ModelSection
from isotrain.trainers.online.build_rank import build_reward_models

BUDGET, PROMPTS, RESPONSES = 96, (1, 24, 40), 6


def trajectories() -> dict[int, Trajectory]:
    """Responses to prompts of a few lengths, some of them empty."""
    draw = np.random.default_rng(0)
    found = {}
    for prompt in PROMPTS:
        prompt_T = draw.integers(3, 512, prompt)
        for sample in range(RESPONSES):
            length = 6 * sample
            found[len(found)] = Trajectory(
                row=0,
                prompt_index=0,
                sample=sample,
                seed=0,
                prompt_length=prompt,
                tokens_T=np.concatenate([prompt_T, draw.integers(3, 512, length)]).astype(np.int32),
                mask_N=np.ones(length, np.bool_),
                logp_N=np.zeros(length, np.float32),
                version_N=np.zeros(length, np.int32),
                finished=False,
            )
    return found


def watch(model: Any) -> list[int]:
    """Tokens of each forward from now on."""
    sizes: list[int] = []
    infer = model.infer

    def watched(batches: list[PackedBatch], objective: Any) -> Any:
        sizes.extend(len(batch.tokens_T) for batch in batches)
        return infer(batches, objective)

    model.infer = watched
    return sizes


def run(device_type: str, reward: dict[str, Any], model: dict[str, Any], out: Path) -> None:
    """The second of two ranks has a single trajectory; writes scores and the sizes of all forwards."""
    device = choose_device(device_type)
    with join_world(device) as world:
        reward_models = build_reward_models(
            RewardSection.model_validate(reward),
            ModelSection.model_validate(model),
            BUDGET,
            device=device,
            world=world,
        )
        of_rank = {i: t for i, t in trajectories().items() if world.size == 1 or (i == 3) == world.rank}
        found = {}
        for name, judge in reward_models.items():
            sizes = watch(judge.model)
            found[name] = {"scores": judge.scores(of_rank), "sizes": sizes}
    out.mkdir(exist_ok=True)
    (out / f"rank-{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4]))
