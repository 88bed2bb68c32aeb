"""Routes of a tiny mixture in the engine and in training, and the log-probs' gap with and without replay.

The engine `hf` samples with a cache from a model of random weights, wide enough for routes to matter; the
trainer computes the same tokens packed. `disagreement` is the share of pairs of a token and a layer whose
sets of experts differ; gaps are means of |logp_trained - logp_engine| in nats. `ratio` is the gap with
`router_replay: R3` over that without, `worst` the same of the tokens with another set somewhere.

Then the mixture learns the task of tiny-grpo in bfloat16, with and without replay: `reward` has means over
fifths of the steps, `gap` and `largest` are of the log-probs and probabilities on the way.

    python benchmarks/router_replay.py [--seeds 4] [--responses 64] [--tokens 64] [--steps 60] [--part ...]
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench
import numpy as np
import torch
from tiny_grpo import tiny_grpo

from isotrain.data.packing import pack_trajectories
from isotrain.data.prepare.tiny import make_tiny
from isotrain.device.detect import choose_device
from isotrain.engine.build import build_alone
from isotrain.models.routes import RouteReplay
from isotrain.recipe.online import RolloutSection
from isotrain.recipe.schema import ModelSection
from isotrain.rollout.base import Request, Sampling
from isotrain.rollout.build import build_rollout

PARTS = ("gaps", "learning")


def measure(model: ModelSection, seed: int, responses: int, tokens: int) -> dict[str, float]:
    device, draw = choose_device("cpu"), np.random.default_rng(seed)
    engine = build_rollout(
        RolloutSection(engine="hf", max_tokens=tokens),
        model.path,
        model.dtype,
        device=device,
        max_prompt=32,
        seed=seed,
        name="engine",
        routes=True,
    )
    requests = [
        Request(i, i, 0, seed * responses + i, draw.integers(5, 400, 32).astype(np.int32))
        for i in range(responses)
    ]
    trajectories = list(engine.generate(requests, Sampling(max_tokens=tokens)))
    policy = build_alone(model, device=device)
    policy.model.replay = replay = RouteReplay(policy.model.pretrained)
    batch = pack_trajectories(trajectories, range(len(trajectories)))
    forced, free = batch.packed, replace(batch.packed, routes=None)
    assert forced.routes is not None
    replay.record()
    ((free_N, own_TLK),) = policy.infer([free], lambda head: (head.logps(), replay.recorded()))
    (forced_N,) = policy.infer([forced], lambda head: head.logps())
    engine_TLK = forced.routes.chosen.long()
    known_T = engine_TLK[:, 0, 0] >= 0
    differs_TL = (engine_TLK.sort(-1).values != own_TLK.sort(-1).values).any(-1) & known_T[:, None]
    turned_N = differs_TL.any(1)[forced.predict_N]
    without_N, with_N = ((logp_N - batch.rollout_logp_N).abs().double() for logp_N in (free_N, forced_N))
    return {
        "disagreement": float(differs_TL.sum() / (known_T.sum() * differs_TL.shape[1])),
        "gap_without": float(without_N.mean()),
        "gap_with": float(with_N.mean()),
        "gap_without_turned": float(without_N[turned_N].mean()) if turned_N.any() else 0.0,
        "gap_with_turned": float(with_N[turned_N].mean()) if turned_N.any() else 0.0,
        "largest_without": float(without_N.max()),
        "largest_with": float(with_N.max()),
    }


def main() -> None:
    parser = bench.Options(__doc__, seeds=1, responses=16, tokens=24)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.read()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        make_tiny(Path(work), train_rows=256, validation_rows=1, architecture="qwen3_moe")
        _widen(Path(work) / "model")
        for dtype in ("bfloat16", "float32") if "gaps" in options.part else ():
            model = ModelSection.model_validate({"path": str(Path(work) / "model"), "dtype": dtype})
            rows = [measure(model, seed, options.responses, options.tokens) for seed in range(options.seeds)]
            means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
            turned = means["gap_without_turned"]
            worst = means["gap_with_turned"] / turned if turned else None
            ratio = means["gap_with"] / means["gap_without"] if means["gap_without"] else 1.0
            bench.report("router_replay", ratio, None, None, dtype=dtype, worst=worst, **means)
        for seed in range(options.seeds) if "learning" in options.part else ():
            for replay in ("disabled", "R3"):
                row = learn(Path(work), replay, seed, options.steps)
                bench.show(
                    name="router_replay learning", replay=replay, seed=seed, steps=options.steps, **row
                )


def learn(work: Path, replay: str, seed: int, steps: int) -> dict[str, Any]:
    rewards, gaps, largest = [], [], []
    algorithm = {"router_replay": replay}
    with tiny_grpo(work, model={"dtype": "bfloat16"}, algorithm=algorithm, seed=seed) as run:
        for _ in range(steps):
            rewards.append(float(run.train().mean()))
            gaps.append(run.gap["training/rollout_logp_diff_mean"])
            largest.append(run.gap["training/rollout_probs_diff_max"])
    return {
        "reward": [round(float(part.mean()), 3) for part in np.array_split(rewards, 5)],
        "gap": bench.spread(gaps),
        "largest": bench.spread(largest),
    }


def _widen(directory: Path) -> None:
    """Random weights of 0.02 leave experts next to nothing to say: make them 0.1."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name and parameter.ndim > 1:
                parameter.mul_(5)
    model.save_pretrained(directory)


if __name__ == "__main__":
    main()
