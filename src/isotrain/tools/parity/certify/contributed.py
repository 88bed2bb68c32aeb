"""The recipes with which the owner of one device certifies it: every algorithm, on a tiny model made here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isotrain.errors import RecipeError
from isotrain.recipe.load import path_override

STEPS = 20
"""Enough for curves beside the step that decides."""
_EVERY = ("model.dtype=float32", "data.validation=null", f"trainer.steps={STEPS}", "trainer.save_every=0")
_OFFLINE = (*_EVERY, "trainer.validate_first=false", "optimizer.lr=1e-3")
_ONLINE = (
    *(*_EVERY, "data.batch_size=8", "rollout.engine=hf", "algorithm.mini_batch_size=4", "optimizer.lr=1e-3"),
    *("algorithm.kl.place=loss", "algorithm.kl.coefficient=0.02", "rollout.weight_check_tolerance=100"),
)
# The shipped recipe, the file of `isotrain prepare tiny` and the changes for each algorithm.
_ALGORITHMS: dict[str, tuple[str, str, Sequence[str]]] = {
    "sft": ("tiny-sft", "train.jsonl", _EVERY),
    "dpo": ("tiny-dpo", "pairs.jsonl", _OFFLINE),
    "kto": ("tiny-dpo", "responses.jsonl", (*_OFFLINE, "algorithm.name=kto")),
    "rm": ("tiny-rm", "pairs.jsonl", _OFFLINE),
    "prm": ("tiny-dpo", "steps.jsonl", (*_OFFLINE, "algorithm.name=prm")),
    "grpo": ("tiny-grpo", "prompts.jsonl", _ONLINE),
    "ppo": ("tiny-grpo", "prompts.jsonl", (*_ONLINE, "algorithm.name=ppo", "optimizer.lr=2e-4")),
    "reinforce++": (
        "tiny-grpo",
        "prompts.jsonl",
        (*_ONLINE, "algorithm.name=reinforce++", "optimizer.lr=2e-4"),
    ),
}


def contributed(names: Sequence[str]) -> list[str]:
    """The algorithms of these names; all of them without any."""
    for name in names:
        if name not in _ALGORITHMS:
            raise RecipeError(f"{name!r} is not contributed; there are {', '.join(_ALGORITHMS)}")
    return list(dict.fromkeys(names)) or list(_ALGORITHMS)


def recipe_of(name: str, model: Path, data: Path) -> tuple[str, list[str]]:
    """The recipe's name, and its changes; model and data are what `isotrain prepare tiny` made."""
    recipe, rows, changes = _ALGORITHMS[name]
    paths = [path_override("model.path", model), path_override("data.train", data / rows)]
    if recipe == "tiny-grpo":
        paths.append(path_override("reward.function.path", f"{data / 'reward.py'}:score"))
    return recipe, [*paths, *changes]
