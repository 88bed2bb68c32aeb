"""A Python function becomes a file that rewards are read from; what cannot is told, with what to write."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isotrain.api import Metrics
from isotrain.api.functions import FILE, function_path
from isotrain.errors import RewardError
from isotrain.rewards.function import load_function, read_source

LIMIT = 3


def at_the_top(response: str, answer: Any) -> float:
    return min(LIMIT, len(response))


def helper(text: str) -> int:
    return len(text)


def test_a_function_of_a_file_is_named_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert function_path(at_the_top, tmp_path) == f"{__file__}:at_the_top"
    assert not list(tmp_path.iterdir())
    monkeypatch.chdir(Path(__file__).parents[1])
    assert function_path(at_the_top, tmp_path) == "api/test_functions.py:at_the_top"


def test_a_function_from_elsewhere_is_written_to_the_run(tmp_path: Path) -> None:
    def score(response: str, answer: Missing | None = None) -> float:  # type: ignore[name-defined]  # noqa: F821
        """Annotations may name what is not there."""
        import math as maths

        def inner(text: str) -> int:
            return len(text)

        return maths.sqrt(sum(inner(part) for part in response.split()))

    path = function_path(score, tmp_path / "run")
    assert path == f"{tmp_path / 'run' / FILE}:score"
    assert load_function(path, read_source(path)).call("abcd efghi", None, {}) == 3.0


def test_what_is_outside_is_told_with_its_remedy(tmp_path: Path) -> None:
    weight = 0.5

    def closes_over(response: str) -> float:
        return weight * len(response)

    def uses_much(response: str, threshold: int = LIMIT) -> float:
        return math.sqrt(helper(response)) + threshold if Path(response) else 0.0

    with pytest.raises(RewardError, match=r"closes_over uses .*: move weight inside the function; or put"):
        function_path(closes_over, tmp_path)
    with pytest.raises(RewardError) as told:
        function_path(uses_much, tmp_path)
    for hint in (
        "write 'import math' inside the function",
        "write 'from pathlib import Path' inside the function",
        "move LIMIT inside the function",
        "'from test_functions import helper'",
    ):
        assert hint in str(told.value), told.value
    assert not list(tmp_path.iterdir())


class Scorer:
    def __call__(self, response: str) -> float:
        return 0.0


@pytest.mark.parametrize("function", [lambda response: 1.0, Scorer(), len])
def test_what_has_no_text_is_refused(function: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="has no source text; write it with def"):
        function_path(function, tmp_path)


def test_a_function_typed_at_a_prompt(tmp_path: Path) -> None:
    made: dict[str, Any] = {"__name__": "__main__"}
    exec("def score(response):\n    return 1.0", made)
    with pytest.raises(
        RewardError, match=r"cannot find the source text of score.*reward.function.path=reward.py:score"
    ):
        function_path(made["score"], tmp_path)


def test_metrics_are_one_line_in_a_notebook() -> None:
    rows = [{"step": float(step), "train/loss": 1.0, "train/lr": 0.1} for step in range(1, 1001)]
    assert repr(Metrics(rows)) == "Metrics(steps 1 to 1000, 3 names such as train/loss, train/lr)"
    assert repr(Metrics([])) == "Metrics(no steps)"
