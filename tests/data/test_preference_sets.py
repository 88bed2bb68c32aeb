from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isotrain.data.preference import read_pair, read_steps
from isotrain.data.prepare.preference_sets import SETS, prepare_preference_set
from isotrain.data.rows import Row
from isotrain.errors import DataError

ASK = {"role": "user", "content": "Hi?"}


def records(name: str, **values: Any) -> list[dict[str, Any]]:
    return list(SETS[name](Row(values, "rows.jsonl:7")))


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_binarised_ultrafeedback() -> None:
    (record,) = records(
        "ultrafeedback",
        prompt="Hi?",
        prompt_id="1",
        messages=[ASK, said("Hello.")],
        chosen=[ASK, said("Hello.")],
        rejected=[ASK, said("No.")],
        score_chosen=8.5,
        score_rejected=6.0,
    )
    assert record["margin"] == 2.5
    pair = read_pair(Row(record, "x"))
    assert pair.chosen.values == {"prompt": [ASK], "completion": [said("Hello.")]}


def test_pairs_without_a_difference_are_left_out() -> None:
    assert records("ultrafeedback", prompt="Hi?", chosen="a", rejected="a") == []


def test_original_ultrafeedback() -> None:
    completions = [
        {"response": "fine", "overall_score": 7.0},
        {"response": "best", "overall_score": 9.0},
        {"response": "unknown", "overall_score": None},
        {"response": "bad", "overall_score": 2.0},
    ]
    (record,) = records("ultrafeedback", instruction="Hi?", completions=completions)
    assert record == {"prompt": [ASK], "chosen": [said("best")], "rejected": [said("bad")], "margin": 7.0}
    assert records("ultrafeedback", instruction="Hi?", completions=completions[:1]) == []
    assert records("ultrafeedback", instruction="Hi?", completions=[completions[0]] * 2) == []


def test_prm800k() -> None:
    steps = [
        {"completions": [{"text": "a", "rating": 1}, {"text": "a?", "rating": -1}], "chosen_completion": 0},
        {"completions": [], "chosen_completion": None, "human_completion": {"text": "b"}},
        {"completions": [{"text": "c", "rating": 0}], "chosen_completion": 0},
        {"completions": [{"text": "d", "rating": -1}], "chosen_completion": None, "human_completion": None},
    ]
    found = records("prm800k", question={"problem": "p"}, label={"steps": steps})
    assert [(r["completions"], r["labels"]) for r in found] == [
        (["a?"], [False]),
        (["a", "b", "c", "d"], [True, True, True, False]),
        (["a", "b", "c"], [True, True, True]),
    ]
    assert all(read_steps(Row(record, "x")).prompt.values == {"prompt": "p"} for record in found)


@pytest.mark.parametrize("mark", ["", "ки "])
def test_math_shepherd(mark: str) -> None:
    text = "How many? Step 1: 5+8 = <<5+8=13>>13. ки\nStep 2: 13 - 1 = 12. The response is: 12 ки"
    label = f"How many? Step 1: 5+8 = <<5+8=13>>13. {mark}+\nStep 2: 13 - 1 = 12. The response is: 12 {mark}-"
    (record,) = records("math-shepherd", input=text, label=label, task="GSM8K")
    assert record == {
        "prompt": "How many?",
        "completions": ["Step 1: 5+8 = <<5+8=13>>13.", "Step 2: 13 - 1 = 12. The response is: 12"],
        "labels": [True, False],
    }


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("math-shepherd", {"input": "no steps", "label": "x"}, "this is not Math-Shepherd"),
        ("math-shepherd", {"input": "q Step 1: a ки", "label": "q Step 1: a ?"}, "no \\+ or - after step 1"),
        ("math-shepherd", {"label": "x"}, "no 'input' among the columns label"),
        ("prm800k", {"question": {"problem": "p"}, "label": []}, "not a row of prm800k"),
        ("ultrafeedback", {"completions": [1]}, "not a row of ultrafeedback"),
    ],
)
def test_rows_of_another_set(tmp_path: Path, name: str, values: dict[str, Any], message: str) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(values) + "\n")
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .*{message}"):
        prepare_preference_set(name, str(source), tmp_path / "out.jsonl")


def test_files(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b"}, {"instruction": "p", "completions": []}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "made" / "pairs.jsonl"
    assert prepare_preference_set("ultrafeedback", str(source), out) == (2, 1)
    assert json.loads(out.read_text()) == rows[0]
