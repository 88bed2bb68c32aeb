"""The fullest micro-batches that a recipe allows, made of meaningless tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from isotrain.data.items import Sample
from isotrain.data.loader import MicroBatch, StepData
from isotrain.data.packing import pack
from isotrain.data.trajectory import Trajectory
from isotrain.recipe.preference import DpoSection, KtoSection, PrmSection, RmSection
from isotrain.recipe.schema import Recipe

# Tokens of a solution's step; only the last has a label.
STEP_TOKENS = 64


def step_samples(recipe: Recipe) -> tuple[int, int]:
    """How many samples a step has over all ranks, and the most tokens of one."""
    rows, longest, rollout = recipe.data.batch_size, recipe.data.max_length, recipe.rollout
    return (rows, longest) if rollout is None else (rows * rollout.n, longest + rollout.max_tokens)


def sample_lengths(recipe: Recipe) -> list[int]:
    """Lengths of the samples of a full micro-batch: the longest ones, and one that fills the rest."""
    budget, longest = recipe.data.tokens_per_micro_batch, recipe.data.max_length
    if isinstance(recipe.algorithm, (DpoSection, RmSection)):
        pairs = max(1, budget // (2 * longest))
        return [min(longest, budget // 2)] * (2 * pairs)
    rest = budget % longest
    return [longest] * (budget // longest) + ([rest] if rest > 1 else [])


def step_data(recipe: Recipe, micro_batches: int) -> StepData:
    """One rank's part of a step of an algorithm that learns from rows."""
    lengths = sample_lengths(recipe)
    batch = _micro_batch(recipe, lengths)
    algorithm = recipe.algorithm
    per_item = 2 if isinstance(algorithm, (DpoSection, RmSection)) else 1
    return StepData(
        batches=[batch] * micro_batches,
        mismatched=[batch] * micro_batches if isinstance(algorithm, KtoSection) else [],
        items=micro_batches * len(lengths) // per_item,
        labels=micro_batches * len(batch.values_V),
        tokens=micro_batches * sum(lengths),
        lengths=lengths * micro_batches,
    )


def _micro_batch(recipe: Recipe, lengths: Sequence[int]) -> MicroBatch:
    steps = isinstance(recipe.algorithm, PrmSection)
    samples = [Sample(np.zeros(length, np.int32), _marks(length, steps)) for length in lengths]
    marked = tuple(int(sample.mask_T[1:].sum()) for sample in samples)
    pairs = isinstance(recipe.algorithm, (DpoSection, RmSection))
    labels = sum(marked) if steps else len(samples) // (2 if pairs else 1)
    return MicroBatch(
        packed=pack(samples),
        lengths=marked,
        values_V=torch.zeros(labels),
        numbers=tuple(range(len(samples) // (2 if pairs else 1))),
        ref_logp_S=torch.zeros(len(samples)),
    )


def _marks(length: int, steps: bool) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.arange(length) % STEP_TOKENS == STEP_TOKENS - 1 if steps else np.ones(length, np.bool_)


def trajectories(recipe: Recipe, shares_prompts: bool) -> list[Trajectory]:
    """One full micro-batch: the longest prompts and responses."""
    assert recipe.rollout is not None
    prompt, response = recipe.data.max_length, recipe.rollout.max_tokens
    budget, group = recipe.data.tokens_per_micro_batch, recipe.rollout.n
    batch: list[Trajectory] = []
    used = 0
    while True:
        fresh = not shares_prompts or len(batch) % group == 0
        used += response + (prompt if fresh else 0)
        if used > budget and batch:
            return batch
        batch.append(_trajectory(len(batch), prompt, response, group))


def _trajectory(number: int, prompt: int, response: int, group: int) -> Trajectory:
    tokens_T = np.zeros(prompt + response, np.int32)
    tokens_T[:prompt] = number // group  # prompts of one group are equal, those of others are not
    return Trajectory(
        row=number // group,
        prompt_index=number // group,
        sample=number % group,
        seed=number,
        prompt_length=prompt,
        tokens_T=tokens_T,
        mask_N=np.ones(response, np.bool_),
        logp_N=np.zeros(response, np.float32),
        version_N=np.zeros(response, np.int32),
        finished=True,
    )
