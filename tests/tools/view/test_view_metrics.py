"""Metrics of a run that is going: only what is new is read, and a resumed run begins afresh."""

from __future__ import annotations

from pathlib import Path

from view_runs import write_metrics

from isotrain.observe.metrics import MetricsLog
from isotrain.tools.view.metrics import MetricsTail

SCORE = "critic/score/mean"


def test_only_new_rows_are_given(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1, 3)
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    tail.refresh()
    told = tail.curves([SCORE, "no/such"])
    assert told["curves"] == {SCORE: {"steps": [1, 2, 3], "values": [0.1, 0.2, 0.3]}}
    write_metrics(tmp_path, 4, 5)
    tail.refresh()
    assert tail.curves([SCORE], after=told["rows"])["curves"][SCORE]["steps"] == [4, 5]
    assert tail.epoch == 0, "nothing that was read has changed"


def test_a_metric_has_only_the_steps_that_wrote_it(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1, 6)
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    tail.refresh()
    name = "val-core/data/reward/mean@1"
    assert tail.curves([name], after=2)["curves"][name]["steps"] == [4, 6]
    assert tail.names()[name] == 3 and tail.names()[SCORE] == 6


def test_many_rows_come_in_parts(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1, 10)
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    tail.refresh()
    first = tail.curves([SCORE], most=4)
    assert (first["rows"], first["all"]) == (4, 10)
    rest = tail.curves([SCORE], after=first["rows"], most=100)
    assert [*first["curves"][SCORE]["steps"], *rest["curves"][SCORE]["steps"]] == list(range(1, 11))


def test_a_resumed_run_replaces_its_last_rows(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1, 6)
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    tail.refresh()
    with MetricsLog.resume(path, 4) as log:
        for step in (5, 6, 7):
            log.append(step, {SCORE: 9.0})
    tail.refresh()
    assert tail.epoch == 1
    assert tail.curves([SCORE])["curves"][SCORE]["values"] == [0.1, 0.2, 0.3, 0.4, 9.0, 9.0, 9.0]


def test_a_torn_line_waits_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    tail = MetricsTail(path)
    tail.refresh()
    assert tail.summary()["rows"] == 1 and tail.problem is None
    with path.open("a") as file:
        file.write(': "nan"}\nnot a row\n{"step": 3, "a": 3}\n')
    tail.refresh()
    assert tail.curves(["a"])["curves"]["a"] == {"steps": [1, 2, 3], "values": [1.0, "nan", 3]}
    assert tail.problem is not None and "line 3" in tail.problem


def test_a_run_without_metrics_has_no_rows(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    tail.refresh()
    assert tail.summary() == {"epoch": 0, "rows": 0, "names": 0, "last": None, "problem": None}
