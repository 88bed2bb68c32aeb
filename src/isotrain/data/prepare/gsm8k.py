"""GSM8K, and tasks made from its solutions: sums, chains of sums for a calculator, preferences.

Solutions have their calculations marked, as in `48/2 = <<48/2=24>>24 clips`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain import hub
from isotrain.data.prepare import calculator
from isotrain.data.rows import Row, Rows, read_rows
from isotrain.errors import DataError

DATA_SOURCE = "openai/gsm8k"
_NAMES = {"huggingface": DATA_SOURCE, "modelscope": "AI-ModelScope/gsm8k"}
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'

CALCULATION = re.compile(r"<<(\d+)([+\-*/])(\d+)=(\d+)>>")
_SOLUTION = re.compile(r"#### (\-?[0-9\.\,]+)")


def prepare_gsm8k(source: Path | None, out: Path) -> dict[str, int]:
    """Write `train.parquet` and `test.parquet` in verl's schema; returns how many rows each file has.

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
        records = list(_rows(read_split(source, split), split))
        table = pyarrow.Table.from_pylist(records, schema=schema)
        pyarrow.parquet.write_table(table, out / f"{split}.parquet")
        written[f"{split}.parquet"] = len(records)
    return written


def read_split(source: Path | None, split: str) -> Rows:
    """The published rows of one split, from a directory or from the Hub."""
    if source is None:
        return read_rows(f"{_NAMES[hub.chosen()]}:main:{split}")
    return read_rows(str(source / f"{split}.jsonl"))


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """As JSON lines; returns how many."""
    lines = [json.dumps(row) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def _write_splits(out: Path, rows_of: Callable[[str], Iterable[Mapping[str, Any]]]) -> dict[str, int]:
    """Both splits as JSON lines, training first; returns how many rows each file has."""
    out.mkdir(parents=True, exist_ok=True)
    return {
        f"{split}.jsonl": write_rows(out / f"{split}.jsonl", rows_of(split)) for split in ("train", "test")
    }


def _rows(rows: Rows, split: str) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(rows):
        question, answer = _field(row, "question"), _field(row, "answer")
        solution = _SOLUTION.search(answer)
        if solution is None:
            raise DataError(f"{row.origin}: the answer has no line like '#### 72'; this is not GSM8K")
        yield {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": solution.group(1).replace(",", "")},
            "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
        }


def _field(row: Row, name: str) -> str:
    value = row.values.get(name)
    if not isinstance(value, str):
        raise DataError(f"{row.origin}: no '{name}'; GSM8K rows have a question and an answer")
    return value


SUMS = "gsm8k-sums"

_MOST_DIGITS = 2

_SumKey = tuple[str, int, int]


def prepare_gsm8k_sums(source: Path | None, out: Path) -> dict[str, int]:
    """Write `train.jsonl` and `test.jsonl`; returns how many rows each has. No calculation is in both.

    Single calculations: a task that models too small for GSM8K's questions can learn. `3 + 5` and `5 + 3`
    are one: the first of them is kept.
    """
    seen: set[_SumKey] = set()
    return _write_splits(out, lambda split: _sums(source, split, seen))


def _sums(source: Path | None, split: str, seen: set[_SumKey]) -> Iterator[dict[str, Any]]:
    for row in read_split(source, split):
        for left, operator, right, result in CALCULATION.findall(str(row.values.get("answer"))):
            key = _sum_key(int(left), operator, int(right))
            if key in seen or max(map(len, (left, right, result))) > _MOST_DIGITS:
                continue
            seen.add(key)
            question = f"Calculate {left} {operator} {right}. Answer with a number."
            yield {
                "data_source": SUMS,
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"style": "rule", "ground_truth": result},
            }


def _sum_key(left: int, operator: str, right: int) -> _SumKey:
    """The same for calculations that differ only in the order of what is added or multiplied."""
    if operator in "+*":
        left, right = sorted((left, right))
    return operator, left, right


TOOL = "gsm8k-tool"

# Small results could be guessed, and longer ones are rare.
_DIGITS_OF_RESULTS = (3, 5)
_OPERATIONS = (2, 3)

# SmolLM2's chat template does not show tools to the model: examples in the prompt do.
_SYSTEM = {"role": "system", "content": "You can call a calculator."}
_EXAMPLES = ("(15 + 27) * 8", "91 - 36 / 4")

_NUMBER = "number"
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, _NUMBER: 3}

# For a number its value; for a calculation its sign and the keys of its parts.
_ChainKey = tuple[Any, ...]
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class _Chain:
    """A calculation whose numbers may be results of others."""

    text: str
    operations: int
    key: _ChainKey
    """The same for calculations that differ only in the order of what is added or multiplied."""

    def as_operand(self, tighter_than: int) -> str:
        """In parentheses, unless its last operation binds more tightly than that."""
        return self.text if _BINDING[self.key[0]] > tighter_than else f"({self.text})"


def prepare_gsm8k_tool(source: Path | None, out: Path) -> dict[str, int]:
    """Write `train.jsonl`, `test.jsonl` and `calculator.py`; returns how many rows each of the first two has.

    No calculation is in both, also with the order of what is added or multiplied changed.
    """
    seen: set[_ChainKey] = set()
    written = _write_splits(out, lambda split: _chained(source, split, seen))
    (out / "calculator.py").write_bytes(Path(calculator.__file__).read_bytes())
    return written


def _chained(source: Path | None, split: str, seen: set[_ChainKey]) -> Iterator[dict[str, Any]]:
    shortest, longest = _DIGITS_OF_RESULTS
    for row in read_split(source, split):
        for chain, result in _chains(str(row.values.get("answer"))):
            fits = chain.operations >= _OPERATIONS[0] and shortest <= len(result) <= longest
            if not fits or chain.key in seen:
                continue
            seen.add(chain.key)
            yield {
                "data_source": TOOL,
                "prompt": [_SYSTEM, *_examples(with_tool=True), _question(chain.text)],
                "prompt_without_tool": [*_examples(with_tool=False), _question(chain.text)],
                "reward_model": {"style": "rule", "ground_truth": result},
            }


def _question(text: str) -> dict[str, str]:
    return {"role": "user", "content": f"Calculate {text}. Answer with a number."}


def _examples(*, with_tool: bool) -> Messages:
    """Questions with their answers; with the tool, it is called before."""
    messages: Messages = []
    for text in _EXAMPLES:
        answer = calculator.Calculator().calculate(text)
        call = json.dumps({"name": "calculate", "arguments": {"expression": text}})
        messages.append(_question(text))
        if with_tool:
            messages.append({"role": "assistant", "content": f"<tool_call>{call}</tool_call>"})
            messages.append({"role": "tool", "content": answer})
        messages.append({"role": "assistant", "content": answer})
    return messages


def _chains(solution: str) -> Iterator[tuple[_Chain, str]]:
    """Each calculation of a solution with its result; numbers that were calculated before are written out.

    Where that would be too many operations, they stay numbers.
    """
    known: dict[str, _Chain] = {}
    for left, sign, right, result in CALCULATION.findall(solution):
        a, b = (known.get(number) or _number(number) for number in (left, right))
        if a.operations + b.operations >= _OPERATIONS[1]:
            a, b = _number(left), _number(right)
        binding = _BINDING[sign]
        text = f"{a.as_operand(binding - 1)} {sign} {b.as_operand(binding)}"
        chain = _Chain(text, a.operations + b.operations + 1, _key(sign, a.key, b.key))
        if calculator.evaluate(text) == int(result):  # some solutions are rounded, or wrong
            known[result] = chain
            yield chain, str(int(result))


def _number(digits: str) -> _Chain:
    return _Chain(str(int(digits)), 0, (_NUMBER, int(digits)))


def _key(sign: str, left: _ChainKey, right: _ChainKey) -> _ChainKey:
    if sign not in "+*":
        return sign, left, right
    parts = [part for side in (left, right) for part in (side[1:] if side[0] == sign else (side,))]
    return sign, *sorted(parts, key=repr)


_RESULT = re.compile(r"(<<[^<>]*=(\d+)>>)(\d+)")
_ANSWER = "\n#### "


def prepare_gsm8k_preferences(source: Path | None, out: Path, seed: int = 0) -> dict[str, int]:
    """Write pairs, labelled responses and labelled steps of both splits; returns the rows of each file.

    Solutions are right, or have one number corrupted: a number after a mark that is not its result. So the
    true reward is known, and the text alone shows which step is wrong.
    """
    out.mkdir(parents=True, exist_ok=True)
    shapes: dict[str, Callable[..., dict[str, Any]]] = {
        "pairs": _pair,
        "responses": _response,
        "steps": _steps,
    }
    written = {}
    for split in ("train", "test"):
        draw = random.Random(f"{seed} {split}")
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in shapes}
        for row in read_split(source, split):
            question, solution = str(row.values["question"]), str(row.values["answer"]).split(_ANSWER)[0]
            steps = solution.split("\n")
            corrupted = corrupt(steps, draw)
            if corrupted is None:
                continue
            for name, shape in shapes.items():
                rows[name].append(shape(question, steps, *corrupted, draw))
        for name, records in rows.items():
            file = f"{name}-{split}.jsonl"
            written[file] = write_rows(out / file, records)
    return written


def corrupt(steps: list[str], draw: random.Random) -> tuple[list[str], int] | None:
    """The steps with one result changed after its mark, and which step that is; None if none has a mark."""
    places = [(number, match) for number, step in enumerate(steps) for match in _RESULT.finditer(step)]
    places = [(number, match) for number, match in places if match[2] == match[3]]
    if not places:
        return None
    number, match = draw.choice(places)
    right = int(match[3])
    wrong = right
    while wrong == right:
        wrong = max(0, right + draw.choice([-1, 1]) * draw.randint(1, max(9, right // 5)))
    step = steps[number]
    changed = f"{step[: match.start(3)]}{wrong}{step[match.end(3) :]}"
    return [*steps[:number], changed, *steps[number + 1 :]], number


def _pair(
    question: str, steps: list[str], corrupted: list[str], wrong: int, draw: random.Random
) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question}],
        "chosen": [{"role": "assistant", "content": "\n".join(steps)}],
        "rejected": [{"role": "assistant", "content": "\n".join(corrupted)}],
    }


def _response(
    question: str, steps: list[str], corrupted: list[str], wrong: int, draw: random.Random
) -> dict[str, Any]:
    """One of the two: no question is there with both, as in labels that users give."""
    good = draw.random() < 0.5
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": "\n".join(steps if good else corrupted)}],
        "label": good,
    }


def _steps(
    question: str, steps: list[str], corrupted: list[str], wrong: int, draw: random.Random
) -> dict[str, Any]:
    """Every step is right but the corrupted one; a quarter of the solutions have none."""
    prompt = [{"role": "user", "content": question}]
    if draw.random() < 0.25:
        return {"prompt": prompt, "completions": steps, "labels": [True] * len(steps)}
    labels = [number != wrong for number in range(len(steps))]
    return {"prompt": prompt, "completions": corrupted, "labels": labels}
