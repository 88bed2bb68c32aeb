"""Rewards from models, computed on the training ranks: reward models and process reward models.

R: trajectories of a micro-batch, N: ends of their steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from isotrain.data.items import Sample
from isotrain.data.packing import PackedBatch, pack, pack_shared, plan_samples
from isotrain.data.preference import join_steps, split_steps
from isotrain.data.trajectory import Trajectory
from isotrain.engine.engine import InferenceModel
from isotrain.engine.scores import StepScores, score_samples, score_steps
from isotrain.models.attention import shares_prompts


class RewardModel(Protocol):
    @property
    def model(self) -> InferenceModel: ...

    def scores(self, trajectories: Mapping[int, Trajectory]) -> dict[int, float]:
        """A score for each trajectory of this rank; all ranks call it together."""
        ...


def _micro_batches(
    model: InferenceModel, samples: Sequence[Sample], prompts: Sequence[int], budget: int
) -> tuple[list[list[int]], list[PackedBatch]]:
    """Which samples are in which micro-batch, and these, equally many on all ranks.

    What a reward model reads is not as long as what the policy wrote: the policy's plan does not hold.
    """
    share, world = shares_prompts(model.model.attention), model.world
    plan = plan_samples(samples, prompts, budget, share)
    counts = world.sum([len(plan) if rank == world.rank else 0 for rank in range(world.size)])
    plan += [[]] * (int(max(counts)) - len(plan))
    chosen = [([samples[i] for i in micro], [prompts[i] for i in micro]) for micro in plan]
    return plan, [
        pack_shared(*chosen_samples) if share else pack(chosen_samples[0]) for chosen_samples in chosen
    ]


@dataclass(frozen=True)
class ResponseRewardModel:
    """One score at the last token of the complete conversation, as in the reward model's training."""

    model: InferenceModel
    budget: int
    closing: Sequence[int]
    """Tokens after a response."""
    ends: Sequence[int]
    """Tokens with which a policy ends a response."""

    def scores(self, trajectories: Mapping[int, Trajectory]) -> dict[int, float]:
        numbers, conversations = list(trajectories), list(trajectories.values())
        plan, batches = _micro_batches(
            self.model,
            [self._sample(t) for t in conversations],
            [t.prompt_length for t in conversations],
            self.budget,
        )
        return {
            numbers[i]: score
            for micro, scores_R in zip(plan, score_samples(self.model, batches), strict=True)
            # The stand-in of an empty micro-batch has a score as well, which belongs to no trajectory.
            for i, score in zip(micro, scores_R.tolist()[: len(micro)], strict=True)
        }

    def _sample(self, trajectory: Trajectory) -> Sample:
        tokens_T = trajectory.tokens_T
        if trajectory.finished and len(trajectory.mask_N) and tokens_T[-1] in self.ends:
            tokens_T = tokens_T[:-1]
        tokens_T = np.append(tokens_T, np.array(self.closing, np.int32))
        return Sample(tokens_T, np.arange(len(tokens_T)) >= trajectory.prompt_length)


AGGREGATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "min": torch.min,
    "mean": torch.mean,
    "product": torch.prod,
    "last": lambda good_N: good_N[-1],
}
"""From the probabilities that a solution's steps are good to its score."""


@dataclass(frozen=True)
class ProcessRewardModel:
    """Each step is scored where it ends, in the tokens that the model was trained on."""

    model: InferenceModel
    budget: int
    step_scores: StepScores
    tokenizer: PreTrainedTokenizerBase
    separator: str
    separator_tokens: Sequence[int]
    aggregate: Callable[[torch.Tensor], torch.Tensor]

    def scores(self, trajectories: Mapping[int, Trajectory]) -> dict[int, float]:
        numbers, solutions = list(trajectories), [self._sample(t) for t in trajectories.values()]
        # The prompt's last token stays with each response: a step may end right after it, and the token
        # before an end must be the one that is stored before it.
        shared = [t.prompt_length - 1 for t in trajectories.values()]
        plan, batches = _micro_batches(self.model, [sample for sample, _ in solutions], shared, self.budget)
        scores = {}
        for micro, good_N in zip(plan, score_steps(self.model, batches, self.step_scores), strict=True):
            by_sample = good_N.float().cpu().split([int(solutions[i][0].mask_T.sum()) for i in micro])
            for i, good_S in zip(micro, by_sample, strict=True):
                scores[numbers[i]] = self.aggregate(good_S).item() if solutions[i][1] else 0.0
        return scores

    def _sample(self, trajectory: Trajectory) -> tuple[Sample, int]:
        """The input of the model and its number of steps; without one, the score is 0."""
        text = self.tokenizer.decode(trajectory.response_N.tolist(), skip_special_tokens=True)
        assert isinstance(text, str)
        steps = split_steps(text, self.separator)
        prompt = trajectory.tokens_T[: trajectory.prompt_length].tolist()
        return join_steps(self.tokenizer, prompt, steps or [""], self.separator_tokens), len(steps)
