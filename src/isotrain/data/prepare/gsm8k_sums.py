"""Single calculations out of GSM8K's solutions: a task that models too small for its questions can learn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isotrain.data.prepare.gsm8k import CALCULATION, read_split, write_rows

DATA_SOURCE = "gsm8k-sums"

_MOST_DIGITS = 2

_Key = tuple[str, int, int]


def prepare_gsm8k_sums(source: Path | None, out: Path) -> dict[str, int]:
    """Write `train.jsonl` and `test.jsonl`; returns how many rows each has. No calculation is in both.

    `3 + 5` and `5 + 3` are one calculation: the first of them is kept.
    """
    out.mkdir(parents=True, exist_ok=True)
    seen: set[_Key] = set()
    written = {}
    for split in ("train", "test"):
        file = f"{split}.jsonl"
        written[file] = write_rows(out / file, _records(source, split, seen))
    return written


def _records(source: Path | None, split: str, seen: set[_Key]) -> Iterator[dict[str, Any]]:
    for row in read_split(source, split):
        for left, operator, right, result in CALCULATION.findall(str(row.values.get("answer"))):
            key = _key(int(left), operator, int(right))
            if key in seen or max(map(len, (left, right, result))) > _MOST_DIGITS:
                continue
            seen.add(key)
            question = f"Calculate {left} {operator} {right}. Answer with a number."
            yield {
                "data_source": DATA_SOURCE,
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"style": "rule", "ground_truth": result},
            }


def _key(left: int, operator: str, right: int) -> _Key:
    """The same for calculations that differ only in the order of what is added or multiplied."""
    if operator in "+*":
        left, right = sorted((left, right))
    return operator, left, right
