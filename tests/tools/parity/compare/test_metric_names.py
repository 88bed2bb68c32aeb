from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isotrain.errors import DataError
from isotrain.tools.parity.compare.metric_names import choose
from isotrain.tools.parity.run import RunLog, Series


def run(path: str, **values: float) -> RunLog:
    metrics = {
        name.replace("__", "/"): Series(np.array([1, 2]), np.array([value, value]))
        for name, value in values.items()
    }
    return RunLog(Path(path), "CSV", metrics)


def levels(one: RunLog) -> dict[str, float]:
    return {name: float(series.values_S[0]) for name, series in one.metrics.items()}


def test_a_plain_name_is_the_same_in_both() -> None:
    a, b = run("a", loss=1.0, other=2.0), run("b", loss=3.0)
    chosen = choose(["loss"], a, b)
    assert chosen.metrics == ("loss",) and chosen.reference is a and levels(chosen.candidate) == {"loss": 3.0}


def test_nothing_asked_for_changes_nothing() -> None:
    a, b = run("a", loss=1.0), run("b", loss=3.0)
    assert choose([], a, b).metrics == () and choose([], a, b).candidate is b


def test_the_candidates_metric_takes_the_references_name() -> None:
    a, b = run("a", loss=1.0, reward=2.0), run("b", train__loss=3.0, reward=4.0)
    chosen = choose(["loss=train/loss", " reward "], a, b)
    assert chosen.metrics == ("loss", "reward")
    assert levels(chosen.candidate) == {"reward": 4.0, "loss": 3.0}
    assert levels(b) == {"train/loss": 3.0, "reward": 4.0}


def test_names_that_change_places_and_one_for_two() -> None:
    a, b = run("a", x=1.0, y=2.0), run("b", x=3.0, y=4.0)
    assert levels(choose(["x=y", "y=x"], a, b).candidate) == {"x": 4.0, "y": 3.0}
    assert levels(choose(["x=y", "y"], a, b).candidate) == {"x": 4.0, "y": 4.0}


def test_an_equals_sign_in_a_name() -> None:
    a = RunLog(Path("a"), "CSV", {"k=1": Series(np.array([1]), np.array([1.0]))})
    assert choose(["k=1"], a, a).metrics == ("k=1",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("los=train/loss", "'a.csv' has no metric 'los': did you mean 'loss'"),
        ("loss=train/lss", "'b.csv' has no metric 'train/lss': did you mean 'train/loss'"),
        ("loss=pg_loss", "'b.csv' has no metric 'pg_loss': did you mean 'train/loss'"),
        ("loss=zzz", "'b.csv' has no metric 'zzz': it has 'train/loss', 'reward'"),
        ("zzz", "'a.csv' has no metric 'zzz': it has 'loss', 'reward'"),
        ("loss=", "write REFERENCE=CANDIDATE"),
        ("=loss", "write REFERENCE=CANDIDATE"),
        ("", "--metric is empty"),
        ("\x1b[31m", r"has no metric '\x1b[31m'"),
    ],
)
def test_refuses_names_with_a_suggestion(text: str, message: str) -> None:
    a, b = run("a.csv", loss=1.0, reward=2.0), run("b.csv", train__loss=3.0, reward=4.0)
    with pytest.raises(DataError) as error:
        choose([text], a, b)
    assert message in str(error.value)


def test_one_name_for_two_metrics_is_an_error() -> None:
    a, b = run("a", x=1.0), run("b", x=3.0, y=4.0)
    with pytest.raises(DataError, match="names 'x' twice: as 'x' and 'y'"):
        choose(["x", "x=y"], a, b)
    assert choose(["x", "x"], a, b).metrics == ("x",)
