"""Distillation in one step of the real loop: a second tiny model teaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made_step import FLAT, step_recipe, take_step
from transformers import AutoModelForCausalLM

from isotrain.algorithms.distillation import divergence
from isotrain.data.prepare.tiny import make_model, make_tokenizer
from isotrain.errors import ModelError, RecipeError
from isotrain.recipe.load import check_values, resolved
from isotrain.recipe.schema import Recipe
from isotrain.trainers.online.precheck import check_online

LOSSES = ("policy-gradient", "k2", "k3", "forward-kl", "reverse-kl", "jsd")


@pytest.fixture(scope="module")
def teacher(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights and another size, with the same tokenizer."""
    path = tmp_path_factory.mktemp("teacher")
    size = make_tokenizer(path, vocab=512, seed=0)
    make_model(
        path,
        seed=9,
        architecture="llama",
        layers=1,
        hidden=96,
        heads=3,
        kv_heads=1,
        vocab=max(512, size),
        tie_word_embeddings=False,
    )
    return path


def recipe_with(tiny: Path, output: Path, device_type: str, teacher: Path, **distillation: Any) -> Recipe:
    settings = {"path": str(teacher), "task_rewards": False, **distillation}
    algorithm = {"name": "grpo", "distillation": settings}
    sections: dict[str, Any] = {"algorithm": algorithm, "data": {"tokens_per_micro_batch": 64}}
    return step_recipe(tiny, output, device_type, **sections)


def divergences(policy: dict[str, torch.Tensor], tiny: Path, teacher: Path, loss: str) -> torch.Tensor:
    """By transformers, of all tokens that the policy wrote, at whole rows of logits."""
    student = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    student.load_state_dict({name: value.cpu() for name, value in policy.items()}, strict=False)
    other = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    values = []
    for trajectory in FLAT:
        ids = torch.from_numpy(trajectory.tokens_T).long()[None]
        at = slice(trajectory.prompt_length - 1, len(trajectory) - 1)
        logits, teacher_logits = (model(ids).logits[0, at].detach() for model in (student, other))
        mask_N = torch.from_numpy(trajectory.mask_N)
        if loss in ("forward-kl", "reverse-kl", "jsd"):
            values.append(divergence(loss, None, logits, teacher_logits)[mask_N])
            continue
        token_N1 = ids[0, trajectory.prompt_length :, None]
        logp_N, teacher_N = (x.log_softmax(-1).gather(1, token_N1)[:, 0] for x in (logits, teacher_logits))
        d_N = teacher_N - logp_N
        of = {"policy-gradient": -d_N, "k2": d_N**2 / 2, "k3": (d_N.exp() - d_N - 1).clamp(-10, 10)}
        values.append(of[loss][mask_N])
    return torch.cat(values)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_metric_is_the_divergence_by_transformers(
    tiny: Path, tmp_path: Path, device_type: str, teacher: Path, loss: str
) -> None:
    step = take_step(recipe_with(tiny, tmp_path / "run", device_type, teacher, loss=loss))
    expected = divergences(step.weights, tiny, teacher, loss).mean().item()
    assert step.metrics["actor/distillation_loss"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert step.metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_is_learnt_from_oneself(tiny: Path, tmp_path: Path, loss: str) -> None:
    recipe = recipe_with(tiny, tmp_path / "run", "cpu", tiny / "model", loss=loss)
    step = take_step(recipe, shaken=0.0)
    assert step.metrics["actor/distillation_loss"] == pytest.approx(0.0, abs=1e-6)
    assert step.metrics["actor/grad_norm"] < 1e-4


def test_rewards_and_the_teacher_are_added(tiny: Path, tmp_path: Path, teacher: Path) -> None:
    """Gradients before clipping: both together are the sum of each alone."""

    def norms(coefficient: float, rewards: bool) -> float:
        name = f"{coefficient}-{rewards}"
        recipe = recipe_with(
            tiny, tmp_path / name, "cpu", teacher, coefficient=coefficient, task_rewards=rewards
        )
        return take_step(recipe).metrics["actor/grad_norm"]

    assert norms(2.0, False) == pytest.approx(2 * norms(1.0, False), rel=1e-4)
    # A vanishing coefficient leaves the rewards alone.
    plain = take_step(step_recipe(tiny, tmp_path / "plain", "cpu", data={"tokens_per_micro_batch": 64}))
    assert norms(1e-12, True) == pytest.approx(plain.metrics["actor/grad_norm"], rel=1e-5)
    assert norms(1.0, True) != pytest.approx(norms(1.0, False), rel=1e-3)


def test_a_clamp_bounds_each_token(tiny: Path, tmp_path: Path, teacher: Path) -> None:
    step = take_step(recipe_with(tiny, tmp_path / "run", "cpu", teacher, clamp=0.01))
    assert abs(step.metrics["actor/distillation_loss"]) <= 0.01


def test_a_teacher_with_another_tokenizer_is_refused(tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    size = make_tokenizer(other, vocab=300, seed=5)
    make_model(
        other,
        seed=1,
        architecture="llama",
        layers=1,
        hidden=64,
        heads=2,
        kv_heads=1,
        vocab=size,
        tie_word_embeddings=True,
    )
    with pytest.raises(ModelError, match=r"algorithm\.distillation\.path: its tokenizer is not the policy's"):
        check_online(recipe_with(tiny, tmp_path / "run", "cpu", other))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task_rewards": False}, "leaves nothing to learn from"),
        ({"path": "t", "top_k": 4}, "top_k cannot be used with loss policy-gradient"),
    ],
)
def test_settings_that_cannot_be(tiny: Path, tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    values = resolved(step_recipe(tiny, tmp_path / "run", "cpu"))
    values["algorithm"]["distillation"] = settings
    with pytest.raises(RecipeError, match=words):
        check_values(values, "recipe")
