from __future__ import annotations

import json
from pathlib import Path

from isotrain.data.prepare.gsm8k import prepare_gsm8k_sums


def questions(tmp_path: Path, train: str, test: str) -> dict[str, list[str]]:
    """What is asked in both files that solutions with these marked calculations give."""
    for split, answer in (("train", train), ("test", test)):
        (tmp_path / f"{split}.jsonl").write_text(
            json.dumps({"question": "How many?", "answer": answer}) + "\n"
        )
    counted = prepare_gsm8k_sums(tmp_path, tmp_path / "out")
    asked = {}
    for name, rows in counted.items():
        lines = [json.loads(line) for line in (tmp_path / "out" / name).read_text().splitlines()]
        assert len(lines) == rows
        asked[name] = [
            f"{line['prompt'][0]['content']} {line['reward_model']['ground_truth']}" for line in lines
        ]
    return asked


def test_a_calculation_is_a_prompt_with_its_result(tmp_path: Path) -> None:
    asked = questions(tmp_path, "<<48/2=24>>24 and <<48+24=72>>72", "<<9-4=5>>5")
    assert asked["train.jsonl"] == [
        "Calculate 48 / 2. Answer with a number. 24",
        "Calculate 48 + 24. Answer with a number. 72",
    ]
    assert asked["test.jsonl"] == ["Calculate 9 - 4. Answer with a number. 5"]


def test_no_calculation_is_in_both_files_in_either_order(tmp_path: Path) -> None:
    train = "<<3+5=8>>8 <<2*7=14>>14 <<8-2=6>>6 <<8/2=4>>4"
    swapped = "<<5+3=8>>8 <<7*2=14>>14 <<8-2=6>>6 <<8/2=4>>4 <<2-8=0>>0 <<2/8=0>>0 <<3*5=15>>15"
    asked = questions(tmp_path, train, swapped)
    assert len(asked["train.jsonl"]) == 4
    # Differences and quotients are others when they are turned round.
    assert [line.split(".")[0] for line in asked["test.jsonl"]] == [
        "Calculate 2 - 8",
        "Calculate 2 / 8",
        "Calculate 3 * 5",
    ]


def test_numbers_of_three_digits_are_left_out(tmp_path: Path) -> None:
    assert questions(tmp_path, "<<100-1=99>>99 <<60+60=120>>120", "<<1+1=2>>2")["train.jsonl"] == []
