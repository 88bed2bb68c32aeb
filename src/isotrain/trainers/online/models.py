"""The models of an online run on one rank: policy, reference, critic, reward models."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isotrain.device.base import Device
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.inference_model import InferenceModel
from isotrain.engine.world import World
from isotrain.trainers.online.reward_models import RewardModel


@dataclass(frozen=True)
class Models:
    device: Device
    world: World
    policy: TrainingEngine
    reference: InferenceModel | None
    """None where no reference is needed, or where the policy without its adapters is the reference."""
    critic: TrainingEngine | None
    value_clip: float | None
    reward_models: dict[str, RewardModel]
    """By their name below `reward`."""
    rollout_dtype: torch.dtype

    def all(self) -> list[TrainingEngine | InferenceModel]:
        reward_models = [scorer.model for scorer in self.reward_models.values()]
        return [m for m in (self.policy, self.reference, self.critic, *reward_models) if m is not None]
