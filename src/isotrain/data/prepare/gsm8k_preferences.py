"""Solutions of GSM8K, right and with one number corrupted: preferences whose true reward is known.

Solutions have their calculations marked, as in `48/2 = <<48/2=24>>24 clips`. In a corrupted one a number that
follows a mark is not its result, so it can be told from the text alone which step is wrong.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isotrain.data.prepare.gsm8k import read_split, write_rows

_RESULT = re.compile(r"(<<[^<>]*=(\d+)>>)(\d+)")
_ANSWER = "\n#### "


def prepare_gsm8k_preferences(source: Path | None, out: Path, seed: int = 0) -> dict[str, int]:
    """Write pairs, labelled responses and labelled steps of both splits; returns the rows of each file."""
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
    places = [(number, found) for number, step in enumerate(steps) for found in _RESULT.finditer(step)]
    places = [(number, found) for number, found in places if found[2] == found[3]]
    if not places:
        return None
    number, found = draw.choice(places)
    right = int(found[3])
    wrong = right
    while wrong == right:
        wrong = max(0, right + draw.choice([-1, 1]) * draw.randint(1, max(9, right // 5)))
    step = steps[number]
    changed = f"{step[: found.start(3)]}{wrong}{step[found.end(3) :]}"
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
