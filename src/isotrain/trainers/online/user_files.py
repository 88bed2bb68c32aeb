"""The files of the user's that workers run: read once, so that all processes of a run have the same text."""

from __future__ import annotations

from typing import NamedTuple

from isotrain import user_file
from isotrain.agents import callers, interfaces
from isotrain.errors import EpisodeError
from isotrain.recipe.online import RolloutSection
from isotrain.recipe.schema import Recipe
from isotrain.reward.build import reward_source


class UserFiles(NamedTuple):
    reward: str | None = None
    """Text of the file of `reward.function`."""
    episodes: str | None = None
    """Text of the file of `rollout.environment` or `rollout.agent`; a program has none, and it is empty."""


def read_user_files(recipe: Recipe) -> UserFiles:
    """None of them where nothing is generated."""
    rollout, reward = recipe.rollout, recipe.reward
    assert rollout is not None and reward is not None
    if not rollout.generates:
        return UserFiles()
    named = named_file(rollout)
    text = user_file.read(*named, EpisodeError) if named else None
    return UserFiles(reward_source(reward), "" if text is None and rollout.episodes else text)


def named_file(rollout: RolloutSection) -> tuple[str, str] | None:
    """`file.py:name` of the environment or agent, and the field that has it."""
    if rollout.environment is not None:
        return rollout.environment.path, interfaces.FIELD
    if rollout.agent is not None and rollout.agent.path is not None:
        return rollout.agent.path, callers.FIELD
    return None
