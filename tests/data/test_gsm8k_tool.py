from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isotrain.data.prepare.gsm8k import prepare_gsm8k_tool
from isotrain.environments.tool_calls import hermes

Rows = list[dict[str, Any]]


def prepared(tmp_path: Path, train: str, test: str = "<<9-4=5>>") -> tuple[Rows, Rows]:
    """The rows of both files that solutions with these marked calculations give."""
    for split, answer in (("train", train), ("test", test)):
        line = json.dumps({"question": "How many?", "answer": answer})
        (tmp_path / f"{split}.jsonl").write_text(line + "\n")
    counted = prepare_gsm8k_tool(tmp_path, tmp_path / "out")
    found = []
    for name, rows in counted.items():
        found.append([json.loads(line) for line in (tmp_path / "out" / name).read_text().splitlines()])
        assert len(found[-1]) == rows
    return found[0], found[1]


def asked(rows: Rows) -> list[str]:
    texts = [row["prompt"][-1]["content"] for row in rows]
    return [text.removeprefix("Calculate ").removesuffix(". Answer with a number.") for text in texts]


def test_results_of_earlier_calculations_are_written_out(tmp_path: Path) -> None:
    rows, _ = prepared(tmp_path, "<<48/2=24>>24 and <<480+24=504>>504, then <<504*3=1512>>")
    assert asked(rows) == ["480 + 48 / 2", "(480 + 48 / 2) * 3"]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["504", "1512"]


@pytest.mark.parametrize(
    "solution, text",
    [
        ("<<100+20=120>> <<500-120=380>>", "500 - (100 + 20)"),
        ("<<100+20=120>> <<120-5=115>>", "100 + 20 - 5"),
        ("<<100-20=80>> <<80*5=400>>", "(100 - 20) * 5"),
        ("<<40/4=10>> <<9000/10=900>>", "9000 / (40 / 4)"),
        ("<<100+20=120>> <<50+120=170>>", "50 + (100 + 20)"),
    ],
)
def test_parentheses_keep_the_value(tmp_path: Path, solution: str, text: str) -> None:
    rows, _ = prepared(tmp_path, solution)
    assert asked(rows) == [text]


def test_no_calculation_has_more_than_three_operations(tmp_path: Path) -> None:
    rows, _ = prepared(tmp_path, "<<2*50=100>> <<100+1=101>> <<101+1=102>> <<102+1=103>> <<103+1=104>>")
    assert asked(rows) == ["2 * 50 + 1", "2 * 50 + 1 + 1", "102 + 1 + 1"]


def test_single_operations_small_results_and_wrong_solutions_are_left_out(tmp_path: Path) -> None:
    rows, _ = prepared(tmp_path, "<<400+400=800>> <<2*3=6>> <<6+4=10>> <<7*30=200>> <<200+1=201>>")
    assert rows == []


@pytest.mark.parametrize(
    "train, test",
    [
        ("<<20*6=120>> <<120+67=187>>", "<<6*20=120>> <<67+120=187>>"),
        ("<<200+300=500>> <<500+50=550>>", "<<50+300=350>> <<200+350=550>>"),
        ("<<2*5=10>> <<10*30=300>>", "<<30*2=60>> <<5*60=300>>"),
    ],
)
def test_no_calculation_is_in_both_files_in_another_order(tmp_path: Path, train: str, test: str) -> None:
    ours, theirs = prepared(tmp_path, train, test)
    assert len(ours) == 1 and theirs == []


def test_differences_and_quotients_are_others_when_they_are_turned_round(tmp_path: Path) -> None:
    train, test = prepared(tmp_path, "<<2*500=1000>> <<1000-200=800>>", "<<800-200=600>> <<600/2=300>>")
    assert len(train) == len(test) == 1


def test_examples_in_prompts_are_calls_that_the_tool_answers_so(tmp_path: Path) -> None:
    (row,), _ = prepared(tmp_path, "<<48/2=24>> <<480+24=504>>")
    namespace: dict[str, Any] = {}
    exec((tmp_path / "out" / "calculator.py").read_text(), namespace)
    tool, messages = namespace["Calculator"](), row["prompt"]
    calls = [i for i, message in enumerate(messages) if "<tool_call>" in message["content"]]
    assert len(calls) == 2
    for i in calls:
        (call,) = hermes(messages[i]["content"]).calls
        result = getattr(tool, call.name)(**call.arguments)
        assert messages[i + 1] == {"role": "tool", "content": result}
        assert messages[i + 2] == {"role": "assistant", "content": result}
        assert call.arguments["expression"] in messages[i - 1]["content"]


def test_the_same_question_is_there_without_the_tool(tmp_path: Path) -> None:
    (row,), _ = prepared(tmp_path, "<<48/2=24>> <<480+24=504>>")
    plain = row["prompt_without_tool"]
    assert plain[-1] == row["prompt"][-1]
    assert not any(message["role"] == "tool" or "tool_call" in message["content"] for message in plain)
    answers = [message for message in row["prompt"] if message["role"] == "assistant"]
    assert [message for message in plain if message["role"] == "assistant"] == answers[1::2]
