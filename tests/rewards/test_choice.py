"""Multiple choice: the letter of a response against that of the row."""

from __future__ import annotations

import pytest

from isotrain.recipe.online import RewardSection
from isotrain.rewards.base import RewardInput
from isotrain.rewards.build import build_scorer
from isotrain.rewards.mathematics import choice_letter, find_choice


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is (B).", "B"),
        ("Answer: **C**", "C"),
        ("so \\boxed{D}", "D"),
        ("so \\boxed{\\text{A}}", "A"),
        ("The answer is A. No, wait: the answer is B", "B"),
        ("答案是 C。", "C"),
        ("B", "B"),
        (" (D) Paris", "D"),
        ("B. Paris", "B"),
        ("A cat sat on the mat.", None),
        ("The answer is Apple", None),
        ("Paris", None),
        ("", None),
    ],
)
def test_the_letter_that_a_response_chooses(response: str, letter: str | None) -> None:
    assert find_choice(response) == letter


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        (" C ", "C"),
        (0, "A"),
        (3, "D"),
        (26, None),
        (-1, None),
        (True, None),
        ("2", None),
        (None, None),
    ],
)
def test_the_letter_of_a_reference_answer(answer: object, letter: str | None) -> None:
    assert choice_letter(answer) == letter


def test_a_row_without_a_letter_is_a_failure() -> None:
    scorer = build_scorer(RewardSection.model_validate({"choice": {"weight": 2.0}}), None)
    right, wrong, broken = scorer.score([RewardInput("B", 1), RewardInput("(A)", "B"), RewardInput("B", "2")])
    assert (right.score, wrong.score) == (2.0, 0.0) and right.failure is wrong.failure is None
    assert broken.failure == "error" and "is no letter" in broken.detail
