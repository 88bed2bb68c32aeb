"""A worker that reads responses as text and scores them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from isotrain.cluster.objects import fetch
from isotrain.models.files import load_tokenizer, model_directory
from isotrain.recipe.schema import Recipe
from isotrain.rewards.base import Scored, Scorer
from isotrain.rewards.build import build_scorer
from isotrain.rewards.responses import reward_inputs, source_of
from isotrain.trainers.build import open_prompts
from isotrain.trainers.online.messages import Score, TrajectoriesHandle

ScoredGroup = tuple[str, tuple[Score, ...]]
"""The data set that a group is from, and its scores."""


class RewardWorker:
    def __init__(self, recipe: dict[str, Any], source: str | None) -> None:
        """`source`: the text of the user's reward file."""
        self.recipe, self.source = Recipe.model_validate(recipe), source
        self.scorer: Scorer | None = None

    def start(self) -> None:
        assert self.recipe.reward is not None
        self.stores = open_prompts(self.recipe)
        self.tokenizer = load_tokenizer(model_directory(self.recipe.model.path))
        self.scorer = build_scorer(self.recipe.reward, self.source)
        self.scorer.start()
        self.answer_key = self.recipe.reward.answer_key

    def score(self, store: str, items: Sequence[tuple[int, TrajectoriesHandle]]) -> list[ScoredGroup | None]:
        """Score each group, given by its row; None if it is lost."""
        assert self.scorer is not None
        groups = fetch([handle for _, handle in items])
        rows = [self.stores[store][row].row for row, _ in items]
        samples = [
            None if group is None else reward_inputs(self.tokenizer, group, values, self.answer_key)
            for group, values in zip(groups, rows, strict=True)
        ]
        scored = iter(
            self.scorer.score([sample for group_samples in samples for sample in group_samples or ()])
        )
        return [
            None
            if group_samples is None
            else (
                source_of(values),
                tuple(
                    Score(s.score, s.parts, s.failure, _with_row(s, store, row))
                    for s in islice(scored, len(group_samples))
                ),
            )
            for group_samples, values, (row, _) in zip(samples, rows, items, strict=True)
        ]

    def close(self) -> None:
        """End the processes of rewards with all that they started, which the end of this one would not."""
        if self.scorer is not None:
            self.scorer.close()


def _with_row(scored: Scored, store: str, row: int) -> str:
    """An error of a reward is mostly one of the row: say which."""
    of_row = scored.failure == "error" and scored.detail.startswith("reward.")
    return f"{scored.detail} (row {row} of the {store} prompts)" if of_row else scored.detail
