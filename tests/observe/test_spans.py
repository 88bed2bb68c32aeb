"""Spans of a step: what is recorded when, joined and bounded, and read back from the run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotrain.errors import DataError
from isotrain.observe import spans as module
from isotrain.observe.run_directory import RunDirectory
from isotrain.observe.spans import MOST_SPANS, Span, SpanLog, joined, read_spans, write_spans


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    return now


def taken(log: SpanLog) -> list[tuple[str, str, float, float]]:
    return [(s.name, s.worker, s.start, s.end) for s in log.take()]


def test_a_step_has_what_ran_in_it_from_its_beginning_to_its_end(clock: list[float]) -> None:
    log = SpanLog("engine", on=True)
    with log.span("before"):
        clock[0] = 1.0
    under_way = log.open("generate")
    clock[0] = 3.0
    log.begin()
    clock[0] = 5.0
    log.close(under_way)
    log.open("reward", "reward worker 1")
    clock[0] = 6.0
    assert taken(log) == [
        ("step", "engine", 3.0, 6.0),
        ("generate", "engine", 3.0, 5.0),
        ("reward", "reward worker 1", 5.0, 6.0),
    ]
    assert log.take() == [], "nothing is recorded after the step"


def test_a_log_that_is_off_reads_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "time", lambda: pytest.fail("the clock was read"))
    log = SpanLog("engine")
    with log.span("generate"):
        pass


def test_overlapping_spans_are_one_and_the_shortest_pauses_go_first() -> None:
    calls = [Span("reward", "w", "h", float(i), i + 1.5) for i in range(3)]
    assert joined(calls) == [Span("reward", "w", "h", 0.0, 3.5)]
    # A pause of 0.9 after each, but a short one after the fifth.
    many = [Span("reward", "w", "h", i - 0.5 * (i == 5), i + 0.1) for i in range(MOST_SPANS + 1)]
    kept = joined(many)
    assert len(kept) == MOST_SPANS and Span("reward", "w", "h", 4.0, 5.1) in kept


def test_spans_are_read_as_they_were_written(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    first, second = Span("step", "rank 0", "h", 1.25, 2.5), Span("step", "rank 1", "h", 1.0, 2.0)
    assert write_spans(run, 3, "rank-0", [second]) is None
    assert write_spans(run, 3, "rank-0", [first]) is None, "a step that is trained again has one profile"
    assert write_spans(run, 3, "rank-1", [second]) is None
    assert read_spans(run) == {3: [first, second]}
    (run.profile / "step-000003" / "spans-rank-1.jsonl").write_text('{"name": "step"}\n')
    with pytest.raises(DataError, match=r"spans-rank-1\.jsonl has no spans .*remove it"):
        read_spans(run)


def test_a_disk_that_cannot_be_written_costs_the_profile_only(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file where the directory should be")
    problem = write_spans(RunDirectory(tmp_path), 3, "controller", [])
    assert problem is not None and problem.startswith("no profile of step 3: ")
