from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from isotrain.data.prepare.gsm8k import prepare_gsm8k
from isotrain.data.rows import read_rows
from isotrain.errors import DataError


def published(directory: Path, answer: str) -> Path:
    directory.mkdir()
    for split in ("train", "test"):
        line = json.dumps({"question": "How many?", "answer": answer})
        (directory / f"{split}.jsonl").write_text(line + "\n")
    return directory


def test_schema(tmp_path: Path) -> None:
    source = published(tmp_path / "in", "1,000 + 1 = <<1000+1=1001>>1001\n#### 1,001")
    assert prepare_gsm8k(source, tmp_path / "out") == {"train.parquet": 1, "test.parquet": 1}
    (row,) = read_rows(str(tmp_path / "out" / "test.parquet"))
    asked = 'How many? Let\'s think step by step and output the final answer after "####".'
    assert row.values == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": asked}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1001"},
        "extra_info": {
            "split": "test",
            "index": 0,
            "answer": "1,000 + 1 = <<1000+1=1001>>1001\n#### 1,001",
            "question": "How many?",
        },
    }


def test_answers_without_a_solution(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl:1: the answer has no line like '#### 72'"):
        prepare_gsm8k(published(tmp_path / "in", "1001"), tmp_path / "out")


def test_the_published_data_set(tmp_path: Path, shared_data: Path) -> None:
    assert prepare_gsm8k(shared_data / "gsm8k", tmp_path) == {"train.parquet": 7473, "test.parquet": 1319}
    table = pyarrow.parquet.read_table(tmp_path / "train.parquet")
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    first = table.slice(0, 1).to_pylist()[0]
    assert first["reward_model"]["ground_truth"] == "72"
    assert first["extra_info"]["question"].startswith("Natalia sold clips")
    truths = table.column("reward_model").to_pylist()
    assert all("," not in truth["ground_truth"] for truth in truths)
