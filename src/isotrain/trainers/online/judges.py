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

from isotrain.data.packing import PackedBatch, pack
from isotrain.data.sample import Sample
from isotrain.data.shared_prompts import pack_shared
from isotrain.data.steps import join_steps, split_steps
from isotrain.data.trajectory import Trajectory
from isotrain.engine.frozen import Frozen
from isotrain.engine.scores import score_samples
from isotrain.engine.verdicts import Verdicts, judge_steps
from isotrain.models.backbone import shares_prompts
from isotrain.trainers.online.step import Micro


class Judge(Protocol):
    @property
    def model(self) -> Frozen: ...

    def scores(self, micros: Sequence[Micro], trajectories: Mapping[int, Trajectory]) -> dict[int, float]:
        """A score for each trajectory of this rank; all ranks bring equally many micro-batches."""
        ...


@dataclass(frozen=True)
class WholeAnswers:
    """One score at the last token of the conversation, written to its end as in the judge's training."""

    model: Frozen
    closing: Sequence[int]
    """What comes after an answer."""
    ends: Sequence[int]
    """Tokens with which a policy ends an answer."""

    def scores(self, micros: Sequence[Micro], trajectories: Mapping[int, Trajectory]) -> dict[int, float]:
        found = score_samples(self.model, [self._packed(micro, trajectories) for micro in micros])
        return {
            i: score
            for micro, scores_R in zip(micros, found, strict=True)
            for i, score in zip(micro.batch.index, scores_R.tolist(), strict=False)
        }

    def _packed(self, micro: Micro, trajectories: Mapping[int, Trajectory]) -> PackedBatch:
        told = [trajectories[i] for i in micro.batch.index]
        samples = [self._sample(trajectory) for trajectory in told]
        shared = shares_prompts(self.model.model.attention)
        packed = pack_shared(samples, [t.prompt_length for t in told]) if shared else pack(samples)
        return packed.to(self.model.world.device)

    def _sample(self, trajectory: Trajectory) -> Sample:
        tokens_T = trajectory.tokens_T
        if trajectory.finished and tokens_T[-1] in self.ends:
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
class Steps:
    """Each step is judged where it ends, in the tokens that the judge was trained on."""

    model: Frozen
    verdicts: Verdicts
    tokenizer: PreTrainedTokenizerBase
    separator: str
    separator_tokens: Sequence[int]
    aggregate: Callable[[torch.Tensor], torch.Tensor]

    def scores(self, micros: Sequence[Micro], trajectories: Mapping[int, Trajectory]) -> dict[int, float]:
        told = [[self._sample(trajectories[i]) for i in micro.batch.index] for micro in micros]
        device = self.model.world.device
        batches = [pack([sample for sample, _ in samples]).to(device) for samples in told]
        found = {}
        for micro, samples, good_N in zip(
            micros, told, judge_steps(self.model, batches, self.verdicts), strict=True
        ):
            own = good_N.float().cpu().split([int(sample.mask_T.sum()) for sample, _ in samples])
            for i, (_, steps), good_S in zip(micro.batch.index, samples, own, strict=True):
                found[i] = self.aggregate(good_S).item() if steps else 0.0
        return found

    def _sample(self, trajectory: Trajectory) -> tuple[Sample, int]:
        """What the judge reads, and how many steps there are; without one, the score is 0."""
        text = self.tokenizer.decode(trajectory.response_N.tolist(), skip_special_tokens=True)
        assert isinstance(text, str)
        steps = split_steps(text, self.separator)
        prompt = trajectory.tokens_T[: trajectory.prompt_length].tolist()
        tokens, ends = join_steps(self.tokenizer, prompt, steps or [""], self.separator_tokens)
        mask_T = np.zeros(len(tokens), np.bool_)
        mask_T[ends] = True
        return Sample(np.array(tokens, np.int32), mask_T), len(steps)
