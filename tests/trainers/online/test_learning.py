"""The tiny task is learnt: from responses of which almost nothing is right to responses that are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from online_runs import online_recipe, run_online

from isotrain.data.prepare.tiny import make_tiny
from isotrain.observe.metrics import read_metrics
from isotrain.recipe.library import locate
from isotrain.recipe.load import load_recipe
from isotrain.recipe.schema import Recipe
from support import needs_vllm

pytestmark = pytest.mark.ray


ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "rloo": {"name": "rloo"},
    "reinforce++": {"name": "reinforce++"},
    "ppo": {"name": "ppo", "critic": {"lr": 5e-3}},
}

STEPS = {"grpo": 45, "rloo": 80, "reinforce++": 80, "ppo": 100}

# While the critic knows nothing, a faster policy settles on one kind of response before it reads the prompt.
LEARNING_RATES = {"ppo": 2e-3}


def learn(tiny: Path, work: Path, algorithm: str, engine: str, device_type: str) -> list[float]:
    recipe = online_recipe(
        tiny,
        work / "run",
        device_type,
        data={"train": str(tiny / "prompts.jsonl"), "batch_size": 16, "max_length": 64},
        algorithm=ALGORITHMS[algorithm],
        rollout={"engine": engine, "n": 8, "max_tokens": 12, "kv_cache_gb": 0.25},
        optimizer={"lr": LEARNING_RATES.get(algorithm, 5e-3)},
        trainer={"steps": STEPS[algorithm]},
    )
    return rewards_of(run_online(recipe, work, timeout=900))


def rewards_of(run: Path) -> list[float]:
    rows = read_metrics(run / "metrics.jsonl")
    # On-policy, trainer and engine have the same weights at every step: the engine got every update whole.
    worst = max(row["training/rollout_logp_diff_mean"] for row in rows)
    print(f"mean difference of log-probs at most {worst:.1e} over {len(rows)} updates")
    assert worst <= 1e-4
    return [row["critic/rewards/mean"] for row in rows]


def check(rewards: list[float]) -> None:
    first, last = sum(rewards[:3]) / 3, sum(rewards[-5:]) / 5
    print(f"mean reward of the first 3 steps {first:.3f}, of the last 5 {last:.3f}")
    assert first < 0.2 and last > 0.9


def as_shipped(work: Path) -> Recipe:
    """`isotrain prepare tiny` and the recipe `tiny-grpo`, with nothing changed but where things are."""
    tiny = work / "tiny"
    make_tiny(tiny)
    return load_recipe(
        locate("tiny-grpo"),
        [
            f"output={work / 'run'}",
            f"model.path={tiny / 'model'}",
            f"data.train={tiny / 'prompts.jsonl'}",
            f"data.validation={tiny / 'prompts-validation.jsonl'}",
            f"reward.function.path={tiny / 'reward.py'}:score",
            "device.type=cpu",
            "cluster.address=local",
        ],
    )


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_mixture_of_experts_learns_with_vllm(tmp_path: Path) -> None:
    make_tiny(tmp_path / "tiny", architecture="qwen3_moe")
    rewards = learn(tmp_path / "tiny", tmp_path, "grpo", "vllm", "cpu")
    check(rewards)


@needs_vllm
@pytest.mark.timeout(1800)
def test_the_shipped_recipe_learns_with_vllm(tmp_path: Path) -> None:
    check(rewards_of(run_online(as_shipped(tmp_path), tmp_path, timeout=1700)))


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("algorithm", ["ppo", "reinforce++", "rloo"])
def test_the_others_learn_with_vllm(tiny: Path, tmp_path: Path, algorithm: str) -> None:
    check(learn(tiny, tmp_path, algorithm, "vllm", "cpu"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_all_learn_with_the_reference_engine(
    tiny: Path, tmp_path: Path, algorithm: str, device_type: str
) -> None:
    check(learn(tiny, tmp_path, algorithm, "hf", device_type))
