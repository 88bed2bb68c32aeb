"""The directory of an evaluation: what is evaluated, a line for each row that is done, and the results."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from isotrain.errors import DataError
from isotrain.files import open_own, open_regular, parse_json, read_regular
from isotrain.observe.run_directory import LARGEST_JSON, write_atomically

SETTINGS, RESPONSES, RESULTS = "evaluation.json", "responses.jsonl", "results.json"
_LONGEST_LINE = 1 << 28


@dataclass(frozen=True)
class Response:
    text: str
    score: float
    tokens: int
    finished: bool
    """Whether the model ended it; otherwise it was cut at `rollout.max_tokens`."""
    failure: str | None = None
    """Why there is no score."""
    detail: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """A row of the data with its responses."""

    row: int
    source: str
    """The data set that it is from."""
    values: Mapping[str, Any]
    prompt_tokens: int
    """0 where the prompt is too long to be answered."""
    responses: tuple[Response, ...]
    prompt_cut: bool = False
    """Whether the prompt was longer, and cut as `data.too_long` says."""

    @property
    def too_long(self) -> bool:
        return not self.prompt_tokens


def write_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Say what is evaluated here; a directory of another evaluation is refused, its responses are others."""
    path = directory / SETTINGS
    if path.exists():
        before = parse_json(read_regular(path, LARGEST_JSON))
        changed = sorted(key for key in {*before, *settings} if before.get(key) != settings.get(key))
        if changed:
            raise DataError(
                f"{directory} has another evaluation, which differs in {', '.join(changed)}; "
                "choose another --out, or remove the directory"
            )
        return
    if (directory / RESPONSES).exists():
        raise DataError(f"{directory} has responses and no {SETTINGS}; choose another --out")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise DataError(f"--out: {directory} cannot be written ({error.strerror or error})") from error


def read_items(path: Path) -> list[Item]:
    """Rows that are done, in their order; a last line that a kill cut off is not done."""
    items: dict[int, Item] = {}
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
            if not line.endswith(b"\n"):
                break
            item = _read(line, f"{path}:{number}")
            if item.row in items:
                raise DataError(f"{path}:{number}: row {item.row} is there twice; remove the directory")
            items[item.row] = item
    return [items[row] for row in sorted(items)]


def _read(line: bytes, where: str) -> Item:
    try:
        fields = parse_json(line)
        responses = tuple(Response(**response) for response in fields.pop("responses"))
        item = Item(**fields, responses=responses)
        if not isinstance(item.row, int) or not all(isinstance(r.score, int | float) for r in responses):
            raise TypeError("wrong types")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{where}: no line of an evaluation ({error}); remove the directory") from error
    return item


class ItemLog:
    """Appends rows as they are done; a kill loses at most the one that is being written."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / RESPONSES
        self.items = read_items(self.path) if self.path.exists() else []
        self._file = open_own(self.path, "ab")
        self._cut_off_unfinished_line()

    def _cut_off_unfinished_line(self) -> None:
        """What would otherwise be the beginning of the next line."""
        data = read_regular(self.path)
        os.ftruncate(self._file.fileno(), data.rfind(b"\n") + 1)

    def add(self, items: Sequence[Item]) -> None:
        lines = "".join(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items).encode()
        view = memoryview(lines)
        while view:  # the file is unbuffered, and may take a part
            view = view[self._file.write(view) :]
        self.items.extend(items)

    def __enter__(self) -> ItemLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
