from __future__ import annotations

from typing import Any

import pytest

from isotrain.data.preference import read_pair, read_responses, read_steps
from isotrain.data.rows import Row
from isotrain.errors import DataError

ASK, SURE = ({"role": "user", "content": text} for text in ("2 + 3?", "Sure?"))
RIGHT, WRONG = {"role": "assistant", "content": "5"}, {"role": "assistant", "content": "6"}


def row(**values: Any) -> Row:
    return Row(values, "rows.jsonl:7")


@pytest.mark.parametrize(
    ("values", "prompt", "chosen"),
    [
        ({"prompt": "2 + 3?", "chosen": "5", "rejected": "6"}, "2 + 3?", "5"),
        ({"prompt": [ASK], "chosen": [RIGHT], "rejected": [WRONG]}, [ASK], [RIGHT]),
        ({"chosen": [ASK, RIGHT], "rejected": [ASK, WRONG]}, [ASK], [RIGHT]),
        # UltraFeedback: the prompt as text, and again as the first message of both sides.
        (
            {"prompt": "2 + 3?", "chosen": [ASK, RIGHT], "rejected": [ASK, WRONG], "score_chosen": 8.0},
            [ASK],
            [RIGHT],
        ),
        ({"prompt": "2 + 3?", "chosen": [RIGHT], "rejected": [WRONG]}, [ASK], [RIGHT]),
        # What both sides begin with comes after the prompt, where that is not among it.
        (
            {"prompt": [ASK], "chosen": [WRONG, SURE, RIGHT], "rejected": [WRONG, SURE, WRONG]},
            [ASK, WRONG, SURE],
            [RIGHT],
        ),
        (
            {"chosen": "\n\nHuman: 2 + 3?\n\nAssistant: 5", "rejected": "\n\nHuman: 2 + 3?\n\nAssistant: 6"},
            "\n\nHuman: 2 + 3?\n\nAssistant:",
            " 5",
        ),
    ],
)
def test_pairs(values: dict[str, Any], prompt: Any, chosen: Any) -> None:
    pair = read_pair(row(**values))
    assert pair.chosen.values == {"prompt": prompt, "completion": chosen}
    assert pair.rejected.values["prompt"] == prompt and pair.rejected.values["completion"] != chosen
    assert pair.chosen.origin == "rows.jsonl:7 (chosen)" and pair.margin is None


def test_margins_and_tools_go_along() -> None:
    pair = read_pair(row(prompt="p", chosen="a", rejected="b", margin=2, tools=[{"name": "f"}]))
    assert pair.margin == 2.0 and pair.rejected.values["tools"] == [{"name": "f"}]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": "p", "chosen": "a"}, "no 'rejected' among the columns 'prompt', 'chosen'"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "'chosen' and 'rejected' are the same"),
        ({"prompt": "p", "chosen": "a", "rejected": [WRONG]}, "must have the same type"),
        ({"chosen": "a", "rejected": "b"}, "the two texts share none"),
        ({"chosen": [RIGHT], "rejected": [WRONG]}, "do not begin with the same message"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "much"}, "'margin' must be a number"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": True}, "'margin' must be a number"),
    ],
)
def test_bad_pairs(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"rows.jsonl:7: .*{message}"):
        read_pair(row(**values))


@pytest.mark.parametrize("label", [True, False, 1, 0])
def test_responses(label: bool | int) -> None:
    (labelled,) = read_responses(row(prompt="p", completion="a", label=label))
    assert labelled.desirable is bool(label)
    assert labelled.response.values == {"prompt": "p", "completion": "a"}


def test_a_pair_is_two_responses() -> None:
    good, bad = read_responses(row(prompt="p", chosen="a", rejected="b"))
    assert (good.desirable, bad.desirable) == (True, False)
    assert (good.response.values["completion"], bad.response.values["completion"]) == ("a", "b")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": "p", "completion": "a"}, "no 'label'"),
        ({"prompt": "p", "completion": "a", "label": "good"}, "'label' must be true or false"),
        ({"completion": "a", "label": True}, "no 'prompt'"),
    ],
)
def test_bad_responses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_responses(row(**values))


def test_steps() -> None:
    labelled = read_steps(row(prompt="p", completions=["a", "b"], labels=[True, 0.25]))
    assert labelled.steps == ["a", "b"] and labelled.labels == [1.0, 0.25]
    assert labelled.prompt.values == {"prompt": "p"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"completions": ["a"], "labels": [1]}, "no 'prompt'"),
        ({"prompt": "p", "completions": [], "labels": []}, "a list of texts"),
        ({"prompt": "p", "completions": ["a", "b"], "labels": [1]}, "for each of 2 steps"),
        ({"prompt": "p", "completions": ["a"], "labels": [2]}, "between 0 and 1: 2"),
        ({"prompt": "p", "completions": ["a"], "labels": ["+"]}, "between 0 and 1"),
    ],
)
def test_bad_steps(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_steps(row(**values))
