"""Published preference data sets in the rows that training reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from isotrain.data.rows import Row, read_rows
from isotrain.errors import DataError

Record = dict[str, Any]

_STEP_END = "ки"


def ultrafeedback(row: Row) -> Iterator[Record]:
    """Binarised rows (`chosen`, `rejected`, their scores), or the original ones with several completions.

    Of the original ones the best-scored completion and the worst make the pair, if their scores differ.
    """
    values = row.values
    if "completions" not in values:
        record = {key: values[key] for key in ("prompt", "chosen", "rejected") if values.get(key) is not None}
        scores = values.get("score_chosen"), values.get("score_rejected")
        if all(isinstance(score, (int, float)) for score in scores):
            record["margin"] = float(scores[0]) - float(scores[1])  # type: ignore[arg-type]
        if record.get("chosen") != record.get("rejected"):  # in some rows nothing is preferred
            yield record
        return
    scored = [
        (float(completion["overall_score"]), str(completion["response"]))
        for completion in values["completions"]
        if isinstance(completion.get("overall_score"), (int, float))
    ]
    if len(scored) < 2:
        return
    # The first of equals: the same file gives the same pairs.
    best, worst = max(scored, key=lambda pair: pair[0]), min(scored, key=lambda pair: pair[0])
    if best[0] > worst[0]:
        prompt = [{"role": "user", "content": str(_required(row, "instruction"))}]
        yield {
            "prompt": prompt,
            "chosen": [{"role": "assistant", "content": best[1]}],
            "rejected": [{"role": "assistant", "content": worst[1]}],
            "margin": best[0] - worst[0],
        }


def prm800k(row: Row) -> Iterator[Record]:
    """The path that the labellers took, and for each other completion on the way the path up to it.

    Ratings are 1 (good), 0 (neutral) and -1 (bad); only the last is a wrong step.
    """
    problem, steps = _required(row, "question")["problem"], _required(row, "label")["steps"]
    texts: list[str] = []
    labels: list[bool] = []
    for step in steps:
        completions = step.get("completions") or []
        chosen = step.get("chosen_completion")
        for number, completion in enumerate(completions):
            if number != chosen and completion.get("rating") is not None:
                yield {
                    "prompt": problem,
                    "completions": [*texts, completion["text"]],
                    "labels": [*labels, completion["rating"] >= 0],
                }
        if chosen is None and step.get("human_completion"):
            texts.append(step["human_completion"]["text"])
            labels.append(True)
        elif chosen is not None and completions[chosen].get("rating") is not None:
            texts.append(completions[chosen]["text"])
            labels.append(completions[chosen]["rating"] >= 0)
        else:
            break
    if texts:
        yield {"prompt": problem, "completions": texts, "labels": labels}


def math_shepherd(row: Row) -> Iterator[Record]:
    """`input` has the steps, each closed by its own token; `label` has them again with `+` or `-` behind."""
    marked, labelled = str(_required(row, "input")), str(_required(row, "label"))
    prompt, marker, solution = marked.partition("Step 1:")
    if not marker:
        raise DataError(f"{row.origin}: no 'Step 1:' in 'input'; this is not Math-Shepherd")
    steps = [part.strip() for part in f"{marker}{solution}".split(_STEP_END)]
    texts: list[str] = []
    labels: list[bool] = []
    at = 0
    for text in (step for step in steps if step):
        at = labelled.find(text, at)
        label = re.match(rf"\s*(?:{_STEP_END}\s*)?([+-])", labelled[at + len(text) :]) if at >= 0 else None
        if label is None:
            raise DataError(f"{row.origin}: 'label' has no + or - after step {len(texts) + 1}")
        texts.append(text)
        labels.append(label[1] == "+")
        at += len(text)
    yield {"prompt": prompt.strip(), "completions": texts, "labels": labels}


SETS: Mapping[str, Callable[[Row], Iterator[Record]]] = {
    "ultrafeedback": ultrafeedback,
    "prm800k": prm800k,
    "math-shepherd": math_shepherd,
}


def prepare_preference_set(name: str, source: str, out: Path) -> tuple[int, int]:
    """Write a published set as JSON lines; returns how many rows were read and written."""
    read = written = 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        for row in read_rows(source):
            read += 1
            for record in _records(name, row):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                written += 1
    return read, written


def _records(name: str, row: Row) -> list[Record]:
    try:
        return list(SETS[name](row))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(f"{row.origin}: not a row of {name} ({type(error).__name__}: {error})") from error


def _required(row: Row, key: str) -> Any:
    if row.values.get(key) is None:
        raise DataError(f"{row.origin}: no '{key}' among the columns {', '.join(row.values)}")
    return row.values[key]
