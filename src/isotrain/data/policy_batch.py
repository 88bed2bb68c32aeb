"""Trajectories as one packed micro-batch, with the other inputs of policy losses.

N: response tokens of the micro-batch in the order of its trajectories, also those the policy did not write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from isotrain.data.packing import PackedBatch, pack
from isotrain.data.sample import Sample
from isotrain.data.shared_prompts import pack_shared
from isotrain.data.trajectory import Trajectory


@dataclass(frozen=True)
class PolicyBatch:
    packed: PackedBatch
    """Prompts and responses; its loss-bearing tokens are all response tokens."""
    lengths: tuple[int, ...]
    """Response tokens of each trajectory, on the host; may be 0."""
    mask_N: torch.Tensor
    """Which tokens the policy wrote."""
    rollout_logp_N: torch.Tensor
    """Log-probs of the policy that sampled, from its engine."""
    index: tuple[int, ...]
    """Number of each trajectory within the step."""
    turn_rewards_N: torch.Tensor | None = None
    """Where episodes have rewards by turn: those of all turns but the last, on their last tokens."""
    earlier: tuple[float, ...] = ()
    """Beside them: rewards that the episode of each trajectory was given in earlier sequences."""

    def to(self, device: torch.device) -> PolicyBatch:
        return replace(
            self,
            packed=self.packed.to(device),
            mask_N=self.mask_N.to(device, non_blocking=True),
            rollout_logp_N=self.rollout_logp_N.to(device, non_blocking=True),
            turn_rewards_N=None if self.turn_rewards_N is None else self.turn_rewards_N.to(device),
        )


def pack_trajectories(
    trajectories: Sequence[Trajectory], index: Sequence[int], share_prompts: bool = False
) -> PolicyBatch:
    """Lay trajectories one after the other; without any, the batch has a token but no response tokens.

    With `share_prompts` a prompt with several responses is there once.
    """
    assert len(trajectories) == len(index)
    samples = []
    for trajectory in trajectories:
        assert trajectory.prompt_length >= 1, "nothing would predict the response's first token"
        is_response_T = np.arange(len(trajectory)) >= trajectory.prompt_length
        samples.append(Sample(trajectory.tokens_T, is_response_T))
    # Copies of the given types even for no trajectories at all, and memory that torch may write to.
    mask_N = np.concatenate([np.zeros(0, np.bool_), *(t.mask_N for t in trajectories)])
    logp_N = np.concatenate([np.zeros(0, np.float32), *(t.logp_N for t in trajectories)])
    prompts = [trajectory.prompt_length for trajectory in trajectories]
    turn_rewards = [_turn_rewards(trajectory) for trajectory in trajectories]
    episodes = [t.episode for t in trajectories if t.episode is not None]
    by_turn = any(episode.earlier for episode in episodes) or any(map(np.any, turn_rewards))
    return PolicyBatch(
        packed=pack_shared(samples, prompts) if share_prompts else pack(samples),
        lengths=tuple(len(t.mask_N) for t in trajectories),
        mask_N=torch.from_numpy(mask_N),
        rollout_logp_N=torch.from_numpy(logp_N),
        index=tuple(index),
        turn_rewards_N=torch.from_numpy(np.concatenate(turn_rewards)) if by_turn else None,
        earlier=tuple(t.episode.earlier if t.episode else 0.0 for t in trajectories) if by_turn else (),
    )


def _turn_rewards(trajectory: Trajectory) -> npt.NDArray[np.float32]:
    """The last turn's is not told apart: it comes with what else is rewarded at the end."""
    rewards_N = np.zeros(len(trajectory.mask_N), np.float32)
    turns = trajectory.episode.turns if trajectory.episode else ()
    for turn in [turn for turn in turns if turn.end > turn.start][:-1]:
        rewards_N[turn.end - 1] = turn.reward
    return rewards_N
