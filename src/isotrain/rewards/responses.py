"""From token ids of responses to what rewards read; the same in training and in `isotrain evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from isotrain.data.formats import value_at
from isotrain.data.trajectory import EpisodePart, Trajectory
from isotrain.rewards.base import FAILURES, RewardInput, Scored


def source_of(values: Mapping[str, Any]) -> str:
    """The data set that a row is from."""
    return str(values.get("data_source", "data"))


def reward_inputs(
    tokenizer: PreTrainedTokenizerBase,
    group: Sequence[Trajectory],
    values: Mapping[str, Any],
    answer_key: str,
) -> list[RewardInput]:
    """One for each response; of an episode, what the policy wrote in its last sequence."""
    last = [t for t in group if t.episode is None or t.episode.part == t.episode.parts - 1]
    texts = tokenizer.batch_decode(
        [t.response_N[t.mask_N].tolist() for t in last],
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    answer = value_at(values, answer_key)
    return [
        RewardInput(text, answer, values, None if t.episode is None else _environment_reward(t.episode))
        for text, t in zip(texts, last, strict=True)
    ]


def _environment_reward(episode: EpisodePart) -> Scored | None:
    """The environment's reward for an episode, or how the episode failed."""
    if episode.failure is not None:
        failure = next((known for known in FAILURES if known == episode.failure), FAILURES[-1])
        return Scored(0.0, failure=failure, detail=episode.detail)
    return None if episode.reward is None else Scored(episode.reward)
