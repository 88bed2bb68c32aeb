"""GSM8K's rule, with values worked by hand from verl's."""

from __future__ import annotations

import pytest

from isotrain.rewards.mathematics import find_answer, gsm8k_score, right_answer


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("so 3 * 4 = 12\n#### 12", "12"),
        ("#### 1,234,567", "1234567"),
        ("#### -5", "-5"),
        ("#### 3.50", "3.50"),
        ("#### 12.", "12."),
        ("#### 12, as said", "12"),
        ("#### 7\nno, wait\n#### 8", "8"),
        ("#### 12 dollars", "12"),
        ("#### $12", None),
        ("####12", None),
        ("####  12", None),
        ("### 12", None),
        ("the answer is 12", None),
        ("#### twelve", None),
        ("#### ١٢", None),
        ("", None),
    ],
)
def test_finds_the_strict_answer(response: str, found: str | None) -> None:
    assert find_answer(response, "strict") == found


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("first 3, then 12", "12"),
        ("the answer is 12 .", "12"),
        ("the answer is 12.", "12."),
        ("it costs $1,234 in all", "1,234"),
        ("from 10 to -5 degrees", "-5"),
        ("3.50 euros", "3.50"),
        ("10-5", "-5"),
        ("I do not know", None),
        ("I do not know.", "."),
        ("", None),
    ],
)
def test_finds_the_flexible_answer(response: str, found: str | None) -> None:
    assert find_answer(response, "flexible") == found


def test_only_the_last_300_characters_are_read() -> None:
    assert find_answer("#### 12" + "x" * 293, "strict") == "12"
    assert find_answer("#### 12" + "x" * 294, "strict") is None
    assert find_answer("12" + "x" * 298, "flexible") == "12"
    assert find_answer("12" + "x" * 299, "flexible") == "2"
    assert find_answer("12" + "x" * 300, "flexible") is None


@pytest.mark.parametrize(
    ("response", "answer", "format_score", "score"),
    [
        ("#### 12", "12", 0.1, 1.0),
        ("#### 1,200", "1200", 0.1, 1.0),
        ("#### 12.0", "12", 0.1, 0.1),
        ("#### 12.", "12", 0.1, 0.1),
        ("#### 012", "12", 0.1, 0.1),
        ("#### 13", "12", 0.0, 0.0),
        ("12", "12", 0.1, 0.0),
    ],
)
def test_scores_answer_and_format(response: str, answer: str, format_score: float, score: float) -> None:
    assert gsm8k_score(response, answer, "strict", format_score) == score


@pytest.mark.parametrize(
    ("value", "strict", "flexible"),
    [
        ("72", "72", "72"),
        (72, "72", "72"),
        (72.0, "72", "72"),
        (-3.5, "-3.5", "-3.5"),
        (1e20, "1" + "0" * 20, "1" + "0" * 20),
        ("1,000", None, "1,000"),
        ("48/2 = 24\n#### 72", None, None),
        (" 72", None, None),
        ("", None, None),
        (float("nan"), None, None),
        ("$72", None, None),
        (["72"], None, None),
    ],
)
def test_right_answers_that_can_be_found(value: object, strict: str | None, flexible: str | None) -> None:
    assert (right_answer(value, "strict"), right_answer(value, "flexible")) == (strict, flexible)


def test_scores_flexible_answers() -> None:
    assert gsm8k_score("so it is 12", "12", "flexible", 0.1) == 1.0
    assert gsm8k_score("so it is 1,200", "1200", "flexible", 0.1) == 0.1
    assert gsm8k_score("nothing", "12", "flexible", 0.1) == 0.0
