"""Chains of calculations out of GSM8K's solutions, as questions for a model with a calculator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.data.prepare import calculator
from isotrain.data.prepare.gsm8k import CALCULATION, read_split, write_rows

DATA_SOURCE = "gsm8k-tool"

# Small results could be guessed, and longer ones are rare.
_DIGITS_OF_RESULTS = (3, 5)
_OPERATIONS = (2, 3)

# SmolLM2's chat template does not show tools to the model: examples in the prompt do.
_SYSTEM = {"role": "system", "content": "You can call a calculator."}
_EXAMPLES = ("(15 + 27) * 8", "91 - 36 / 4")

_NUMBER = "number"
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, _NUMBER: 3}

# Of a number its value; of a calculation its sign and the keys of its parts.
_Key = tuple[Any, ...]
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class _Chain:
    """A calculation whose numbers may be results of others."""

    text: str
    operations: int
    key: _Key
    """The same for calculations that differ only in the order of what is added or multiplied."""

    def as_operand(self, tighter_than: int) -> str:
        """In parentheses, unless its last operation binds more tightly than that."""
        return self.text if _BINDING[self.key[0]] > tighter_than else f"({self.text})"


def prepare_gsm8k_tool(source: Path | None, out: Path) -> dict[str, int]:
    """Write `train.jsonl`, `test.jsonl` and `calculator.py`; returns how many rows each of the first two has.

    No calculation is in both, also with the order of what is added or multiplied changed.
    """
    out.mkdir(parents=True, exist_ok=True)
    seen: set[_Key] = set()
    written = {}
    for split in ("train", "test"):
        file = f"{split}.jsonl"
        written[file] = write_rows(out / file, _records(source, split, seen))
    (out / "calculator.py").write_bytes(Path(calculator.__file__).read_bytes())
    return written


def _records(source: Path | None, split: str, seen: set[_Key]) -> Iterator[dict[str, Any]]:
    shortest, longest = _DIGITS_OF_RESULTS
    for row in read_split(source, split):
        for chain, result in _chains(str(row.values.get("answer"))):
            fits = chain.operations >= _OPERATIONS[0] and shortest <= len(result) <= longest
            if not fits or chain.key in seen:
                continue
            seen.add(chain.key)
            yield {
                "data_source": DATA_SOURCE,
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


def _key(sign: str, left: _Key, right: _Key) -> _Key:
    if sign not in "+*":
        return sign, left, right
    parts = [part for side in (left, right) for part in (side[1:] if side[0] == sign else (side,))]
    return sign, *sorted(parts, key=repr)
