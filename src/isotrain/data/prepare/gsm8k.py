"""GSM8K as Parquet in the schema that reinforcement learning on verl uses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from isotrain.data.rows import Row, Rows, read_rows
from isotrain.errors import DataError

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'

# Solutions have their calculations marked as <<48/2=24>>.
CALCULATION = re.compile(r"<<(\d+)([+\-*/])(\d+)=(\d+)>>")
_SOLUTION = re.compile(r"#### (\-?[0-9\.\,]+)")


def prepare_gsm8k(source: Path | None, out: Path) -> dict[str, int]:
    """Write `train.parquet` and `test.parquet`; returns how many rows each file has.

    `source` is a directory with the published `train.jsonl` and `test.jsonl`; without it the Hub is asked.
    """
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.string()
    schema = pyarrow.schema(
        [
            ("data_source", text),
            ("prompt", pyarrow.list_(pyarrow.struct([("content", text), ("role", text)]))),
            ("ability", text),
            ("reward_model", pyarrow.struct([("ground_truth", text), ("style", text)])),
            (
                "extra_info",
                pyarrow.struct(
                    [("answer", text), ("index", pyarrow.int64()), ("question", text), ("split", text)]
                ),
            ),
        ]
    )
    out.mkdir(parents=True, exist_ok=True)
    written = {}
    for split in ("train", "test"):
        records = list(_records(read_split(source, split), split))
        table = pyarrow.Table.from_pylist(records, schema=schema)
        pyarrow.parquet.write_table(table, out / f"{split}.parquet")
        written[f"{split}.parquet"] = len(records)
    return written


def read_split(source: Path | None, split: str) -> Rows:
    """The published rows of one split, from a directory or from the Hub."""
    if source is None:
        return read_rows(f"{DATA_SOURCE}:main:{split}")
    return read_rows(str(source / f"{split}.jsonl"))


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """As JSON lines; returns how many."""
    lines = [json.dumps(row) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def _records(rows: Rows, split: str) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(rows):
        question, answer = _field(row, "question"), _field(row, "answer")
        found = _SOLUTION.search(answer)
        if found is None:
            raise DataError(f"{row.origin}: the answer has no line like '#### 72'; this is not GSM8K")
        yield {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": found.group(1).replace(",", "")},
            "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
        }


def _field(row: Row, name: str) -> str:
    value = row.values.get(name)
    if not isinstance(value, str):
        raise DataError(f"{row.origin}: no '{name}'; GSM8K rows have a question and an answer")
    return value
