"""The power table: its counts, its intervals, its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isotrain.errors import DataError
from isotrain.parity.power import Power, PowerRow, load_power, wilson


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


def test_nothing_tried_is_nothing_known() -> None:
    assert table().of("reruns") is None and "reruns" not in table().as_json()["evidence"]


def test_round_trip(tmp_path: Path) -> None:
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
