"""A worker that reads responses as text and scores them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from isotrain.cluster.objects import fetch
from isotrain.data.formats import value_at
from isotrain.data.trajectory import Trajectory
from isotrain.models.load import load_tokenizer, model_directory
from isotrain.recipe.schema import Recipe
from isotrain.reward.base import RewardInput, Scorer
from isotrain.reward.build import build_scorer
from isotrain.trainers.online.messages import Score, TrajectoriesHandle
from isotrain.trainers.setup import open_prompts

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
        """Of each group, given by its row; None if it is lost."""
        assert self.scorer is not None
        groups = fetch([handle for _, handle in items])
        rows = [self.stores[store][row].row for row, _ in items]
        samples = [
            sample
            for group, values in zip(groups, rows, strict=True)
            if group is not None
            for sample in self._samples(group, values)
        ]
        scored = iter(self.scorer.score(samples))
        return [
            None
            if group is None
            else (
                str(values.get("data_source", "data")),
                tuple(Score(s.score, s.parts, s.failure, s.detail) for s in islice(scored, len(group))),
            )
            for group, values in zip(groups, rows, strict=True)
        ]

    def _samples(self, group: Sequence[Trajectory], values: dict[str, Any]) -> list[RewardInput]:
        texts = self.tokenizer.batch_decode(
            [t.response_N.tolist() for t in group],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        answer = value_at(values, self.answer_key)
        return [RewardInput(text, answer, values) for text in texts]

    def close(self) -> None:
        """End the processes of rewards with all that they started, which the end of this one would not."""
        if self.scorer is not None:
            self.scorer.close()
