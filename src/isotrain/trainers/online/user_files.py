"""The files of the user's that workers run: read once, so that all processes of a run have the same text."""

from __future__ import annotations

from typing import NamedTuple

from isotrain import user_file
from isotrain.agents.interfaces import FIELD
from isotrain.errors import EpisodeError
from isotrain.recipe.schema import Recipe
from isotrain.reward.build import reward_source


class UserFiles(NamedTuple):
    reward: str | None = None
    """Text of the file of `reward.function`."""
    environment: str | None = None
    """Text of the file of `rollout.environment`."""


def read_user_files(recipe: Recipe) -> UserFiles:
    """None of them where nothing is generated."""
    rollout, reward = recipe.rollout, recipe.reward
    assert rollout is not None and reward is not None
    if not rollout.generates:
        return UserFiles()
    environment = rollout.environment
    text = user_file.read(environment.path, FIELD, EpisodeError) if environment else None
    return UserFiles(reward_source(reward), text)
