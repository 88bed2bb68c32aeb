"""A recipe's reward on rows that have responses: for people who write rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from isotrain.data.encode import json_line
from isotrain.data.formats import value_at
from isotrain.data.rows import read_rows
from isotrain.errors import DataError
from isotrain.files import parse_json
from isotrain.recipe.online import RewardSection
from isotrain.rewards.base import RewardInput, Scored
from isotrain.rewards.build import build_scorer, reward_source

# Rows that are scored together: enough for all processes of a reward.
_AT_ONCE = 256


@dataclass(frozen=True)
class ScoredRow:
    origin: str
    responses: tuple[str, ...]
    scores: tuple[Scored, ...]

    def as_json(self) -> dict[str, Any]:
        scores = [
            {"score": s.score, "parts": dict(s.parts), "failure": s.failure, "detail": s.detail}
            for s in self.scores
        ]
        return {"row": self.origin, "scores": scores}


def score_rows(reward: RewardSection, source: str, key: str) -> Iterator[ScoredRow]:
    """Scores of the responses in each row's column `key`; so are those of `isotrain evaluate`."""
    scorer = build_scorer(reward, reward_source(reward))
    try:
        scorer.start()
        rows = iter(read_rows(source))
        while chunk := list(islice(rows, _AT_ONCE)):
            read = [(row.origin, *_responses(parse_json(json_line(row)), key, row.origin)) for row in chunk]
            inputs = [
                RewardInput(response, value_at(values, reward.answer_key), values)
                for _, values, responses in read
                for response in responses
            ]
            scored = iter(scorer.score(inputs))
            for origin, _, responses in read:
                yield ScoredRow(origin, tuple(responses), tuple(islice(scored, len(responses))))
    finally:
        scorer.close()


def _responses(values: Mapping[str, Any], key: str, origin: str) -> tuple[Mapping[str, Any], Sequence[str]]:
    """The row as rewards see it, and its responses."""
    responses = value_at(values, key)
    if isinstance(values.get("values"), Mapping) and isinstance(values.get("responses"), list):
        values, responses = values["values"], [r.get("text") for r in values["responses"]]
    texts = [responses] if isinstance(responses, str) else responses
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{origin}: '{key}' must be a response or a list of them; name the column with --response-key"
        )
    return values, texts
