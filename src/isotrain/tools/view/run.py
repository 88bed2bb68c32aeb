"""One run as the page sees it: state, curves, rows, episodes."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from isotrain.errors import DataError, install
from isotrain.files import parse_json, read_regular
from isotrain.observe.run_directory import RunDirectory
from isotrain.terminal import visible
from isotrain.tools.view.metrics import MetricsTail, finite_or_word
from isotrain.tools.view.parquet import Column, read_row, read_rows
from isotrain.tools.view.tokens import Pieces, find_tokenizer, load_pieces
from isotrain.tools.view.trajectories import TrajectoryIndex

MOST_TOKENS = 8_000
# A prompt is read from its end: there is the question.
PROMPT_TOKENS = 2_000
MOST_OF_GROUP = 128
_PREVIEW_TOKENS = 48
_MOST_PARTS, _MOST_TURNS, _LONGEST_DETAIL = 100, 1_000, 4_000
_LARGEST_RECIPE = 16 << 20


class RunView:
    """Opening a run reads only its recipe; `refresh` reads what has been written since the last time."""

    def __init__(self, path: Path, tokenizer: Path | None = None) -> None:
        files = RunDirectory(path)
        if not (files.metrics.is_file() or files.resolved.is_file()):
            raise DataError(f"{path} is not a run directory: give the `output` of a recipe that was trained")
        self.path = path
        self.metrics = MetricsTail(files.metrics)
        self.trajectories = TrajectoryIndex(files.trajectories)
        self._recipe = _read_recipe(files.resolved)
        self._tokenizer = tokenizer
        self._pieces: Pieces | None = None
        self._no_pieces: str | None = None
        self._loading = threading.Lock()
        self._readable = importlib.util.find_spec("pyarrow") is not None

    def refresh(self, stop: Callable[[], bool] = lambda: False) -> None:
        """`stop` is asked before each file."""
        self.metrics.refresh()
        if self._readable:
            self.trajectories.refresh(stop)

    def state(self) -> dict[str, Any]:
        """Small: the page asks for it again and again."""
        missing = f"trajectories need the package 'pyarrow': {install('train')}"
        recorded = _at(self._recipe, "rollout", "record")
        # Weights that are some versions old disagree by more than rounding.
        watched = None if _at(self._recipe, "rollout", "staleness") else self.metrics.watch.problem or None
        return {
            "name": visible(str(self._recipe.get("name") or self.path.name), one_line=True)[:100],
            "path": visible(str(self.path), one_line=True)[:300],
            "algorithm": visible(str(_at(self._recipe, "algorithm", "name") or ""), one_line=True)[:50],
            "steps": _whole(_at(self._recipe, "trainer", "steps")),
            "recorded": recorded if isinstance(recorded, bool) else None,
            "metrics": self.metrics.summary(),
            "trajectories": self.trajectories.summary(),
            "problem": watched if self._readable else missing,
        }

    def pieces(self) -> tuple[Pieces, str | None]:
        """Loaded when the first token is shown, which takes up to a second."""
        with self._loading:
            if self._pieces is None:
                model = _at(self._recipe, "model", "path")
                given = self._tokenizer / "tokenizer.json" if self._tokenizer else None
                file = given or find_tokenizer(model if isinstance(model, str) else None, self.path)
                self._pieces, self._no_pieces = load_pieces(file)
            return self._pieces, self._no_pieces

    def episode(
        self,
        step: int,
        rank: int,
        index: int,
        prompt_tokens: int = PROMPT_TOKENS,
        response_tokens: int = MOST_TOKENS,
    ) -> dict[str, Any]:
        """One recorded response with the end of its prompt, token by token."""
        row = read_row(self.trajectories.file(step, rank), index)
        parts = row["parts"] if isinstance(row["parts"], list) else []
        hidden = len(row["prompt"]) - prompt_tokens
        return {
            "step": step,
            "rank": rank,
            "index": index,
            **{name: row[name] for name in ("row", "prompt_index", "sample", "seed", "finished")},
            **{name: finite_or_word(row[name]) for name in ("score", "greedy", "reward", "advantage")},
            **{name: _line(row[name]) for name in ("source", "failure", "detail")},
            "parts": [[_line(name), finite_or_word(value)] for name, value in parts[:_MOST_PARTS]],
            "episode": _episode(row["episode"]),
            "prompt": self._tokens(row, "prompt", max(0, hidden), prompt_tokens),
            "response": self._tokens(row, "response", 0, response_tokens),
            "no_text": self.pieces()[1],
        }

    def tokens(self, step: int, rank: int, index: int, part: str, start: int, count: int) -> dict[str, Any]:
        """More tokens of an episode's prompt or response."""
        return self._tokens(read_row(self.trajectories.file(step, rank), index), part, start, count)

    def group(self, step: int, prompt_index: int) -> list[dict[str, Any]]:
        """The responses to one draw of a prompt, each with the last words of its text."""
        rows = self.trajectories.group(step, prompt_index, MOST_OF_GROUP)
        pieces = self.pieces()[0]
        for rank in {row["rank"] for row in rows}:
            ranks = [row for row in rows if row["rank"] == rank]
            file = self.trajectories.file(step, rank)
            responses = read_rows(file, [row["index"] for row in ranks], ["response"])
            for row in ranks:
                last: Column = responses[row["index"]]["response"][-_PREVIEW_TOKENS:]
                row["end"] = pieces.text(last.tolist())
        return rows

    def _tokens(self, row: dict[str, Any], part: str, start: int, count: int) -> dict[str, Any]:
        ids: list[int] = row[part][start : start + count].tolist()
        pieces, joined = self.pieces()[0].of(ids)
        tokens: dict[str, Any] = {"start": start, "all": len(row[part]), "ids": ids}
        tokens |= {"pieces": pieces, "joined": joined}
        if part == "response":
            logp: Sequence[float] = row["logp"][start : start + count].tolist()
            tokens["logp"] = [finite_or_word(round(value, 5)) for value in logp]
            tokens["mask"] = _runs(row["mask"][start : start + count].tolist())
            tokens["version"] = _runs(row["version"][start : start + count].tolist())
        return tokens


def _read_recipe(path: Path) -> dict[str, Any]:
    """Only some names are taken from it: also recipes of other versions are good enough."""
    try:
        content = parse_json(read_regular(path, _LARGEST_RECIPE))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _at(recipe: dict[str, Any], section: str, name: str) -> object:
    values = recipe.get(section)
    return values.get(name) if isinstance(values, dict) else None


def _runs(values: list[Any]) -> list[list[Any]]:
    """Equal neighbours as `[value, how many]`: masks and versions change seldom."""
    return [[value, len(list(same))] for value, same in groupby(values)]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _episode(recorded: object) -> dict[str, Any] | None:
    """An episode and its turns, as a recording with agents has them."""
    if not isinstance(recorded, dict):
        return None
    turns = recorded.get("turns") or []
    numbers = ("start", "end", "reward", "calls", "failures", "seconds")
    return {
        **{name: finite_or_word(recorded.get(name)) for name in ("part", "parts", "reward")},
        **{name: _line(recorded.get(name)) for name in ("failure", "detail")},
        "turns": [{name: finite_or_word(turn.get(name)) for name in numbers} for turn in turns[:_MOST_TURNS]],
    }


def _line(text: object) -> str | None:
    return None if text is None else visible(str(text)[:_LONGEST_DETAIL])
