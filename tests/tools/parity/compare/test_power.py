"""The power table: its counts, its intervals, its file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from isotrain.errors import DataError
from isotrain.tools.parity.compare.comparison import compare
from isotrain.tools.parity.compare.outcome import OtherRuns, Pairing, outcome_of
from isotrain.tools.parity.compare.power import Power, PowerRow, called, evidence_of, load_power, wilson
from isotrain.tools.parity.levels.level import Level
from isotrain.tools.parity.run import RunLog, Series
from isotrain.tools.parity.verdict import Verdict, judge


def row(name: str, kind: str, logs: str, probes: str | None = None) -> PowerRow:
    verdicts = {"logs": logs} | ({} if probes is None else {"probes": probes})
    return PowerRow(name, kind, "sft", verdicts, None, True)  # type: ignore[arg-type]


def table() -> Power:
    rows = (
        row("mask shifted by one", "mutation", "different", "different"),
        row("learning rate x 1.01", "mutation", "inconclusive", "different"),
        row("optimizer state in bf16", "mutation", "same", "inconclusive"),
        row("only in logs", "mutation", "different"),
        row("rerun", "honest", "same", "same"),
        row("other kernels", "honest", "inconclusive", "different"),
    )
    return Power("pairs of tiny models", "2026-01-02", rows)


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    [
        # Printed tables: Newcombe 1998 (81 of 263, 15 of 148, 0 of 20, 1 of 29); the rest by symmetry.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
        (0, 1, 0.0, 0.7935),
    ],
)
def test_intervals_as_in_print(count: int, total: int, low: float, high: float) -> None:
    found = wilson(count, total)
    assert found is not None
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


def test_each_kind_of_evidence_has_its_own_counts() -> None:
    """Doubt is neither caught nor accused."""
    logs, probes = table().of("logs"), table().of("probes")
    assert logs is not None and (logs.caught, logs.mutations, logs.accused, logs.honest) == (2, 4, 0, 2)
    assert probes is not None and (probes.caught, probes.mutations, probes.accused) == (2, 3, 1)
    assert logs.miss_rate == wilson(2, 4) and probes.false_alarm_rate == wilson(1, 2)


def test_doubt_is_no_miss_and_no_acceptance() -> None:
    told = table().told("logs")
    assert told is not None and (told["missed"], told["accepted"], told["evidence"]) == (1, 1, "logs")


def test_a_pair_that_does_not_count_is_in_no_row() -> None:
    equal = PowerRow("rerun", "honest", "sft", {}, None, None, note="equal in every bit")
    power = Power("p", "2026-01-02", (*table().rows, equal))
    assert power.of("logs") == table().of("logs")


def verdict(
    pairing: Pairing = "paired", replay: str | None = None, *levels: Level, shift: float = 0.0
) -> Verdict:
    """Of two runs whose curves are `shift` apart."""
    steps_S = np.arange(1, 61)
    recipe = {"rollout": {"replay": replay}} if replay else None
    noise_S = np.random.default_rng(1).normal(0, 0.01, (2, 60))
    runs = [
        RunLog(Path(name), "test", {"critic/rewards/mean": Series(steps_S, 0.5 + more + own_S)}, recipe)
        for name, more, own_S in (("a", 0.0, noise_S[0]), ("b", shift, noise_S[1]))
    ]
    compared = compare(*runs)
    return judge(compared, outcome_of(compared, pairing), levels)


P1, P3 = Level("P1", "same", "agree"), Level("P3", "same", "inside")


@pytest.mark.parametrize(
    ("found", "evidence"),
    [
        (verdict(), "logs"),
        (verdict("paired", None, P3), "reruns"),
        (verdict("paired", None, P1), "probes"),
        (verdict("paired", None, P1, P3), "probes+reruns"),
        (verdict("paired", "runs/here", P1), "replay"),
    ],
)
def test_names_the_evidence_of_a_verdict(found: Verdict, evidence: str) -> None:
    assert evidence_of(found) == evidence


def test_reruns_of_runs_that_sampled_count_as_such() -> None:
    compared = verdict("free-running").comparison
    reruns = OtherRuns([compared.candidate, compared.reference])
    found = judge(compared, outcome_of(compared, "free-running", reruns), ())
    assert evidence_of(found) == "reruns" and evidence_of(verdict("free-running")) == "logs"


def test_one_word_for_two_answers() -> None:
    """Curves of runs that sampled say nothing about the computation: the outcome decides."""
    assert called(verdict("free-running")) == "same"
    assert called(verdict("free-running", shift=0.3)) == called(verdict(shift=0.3)) == "different"
    assert called(verdict("paired", None, P3)) == "same" and called(verdict()) == "inconclusive"
    wrong = Level("P1", "different", "the first layer")
    assert called(verdict("paired", None, wrong, P3)) == "different"


def test_nothing_tried_is_nothing_known() -> None:
    assert table().of("reruns") is None and "reruns" not in table().as_json()["evidence"]


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "power.json"
    assert load_power(path) is None
    path.write_text(json.dumps(table().as_json()))
    assert load_power(path) == table()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"verdicts": {"logs": "good"}}, "rows.0.verdicts.logs"),
        ({"kind": None}, "rows.0.kind"),
        ({"published": "yes"}, "rows.0.published"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, change: dict[str, object], where: str) -> None:
    path = tmp_path / "power.json"
    content = table().as_json()
    content["rows"][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"not a power table: {where}"):
        load_power(path)
    path.write_text("[")
    with pytest.raises(DataError, match="not a power table"):
        load_power(path)


def test_the_packaged_table_is_one() -> None:
    power = load_power()
    assert power is None or power.rows
