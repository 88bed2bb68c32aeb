from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest

from isotrain.errors import DataError, RecipeError
from isotrain.observe.metrics import MetricsLog, read_metrics


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def write_steps(path: Path, steps: range) -> bytes:
    with MetricsLog(path) as log:
        for step in steps:
            log.append(step, {"train/loss": 1.0 / step})
    return path.read_bytes()


def test_floats_read_back_bit_for_bit(tmp_path: Path) -> None:
    random = np.random.default_rng(0).integers(0, 2**64, 2000, dtype=np.uint64).view(np.float64)
    special = [0.1, -0.0, 5e-324, 1.7976931348623157e308, 1e22, math.inf, -math.inf, math.nan, 3.0]
    values = [float(x) for x in random if not math.isnan(x)] + special
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.append(1, {str(i): value for i, value in enumerate(values)})
    (row,) = read_metrics(tmp_path / "m.jsonl")
    assert row["step"] == 1
    assert [bits(row[str(i)]) for i in range(len(values))] == [bits(value) for value in values]


def test_numpy_and_whole_numbers_are_floats(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.append(1, {"a": np.float32(0.1), "b": np.float64(0.1), "c": 7})  # type: ignore[dict-item]
    (row,) = read_metrics(tmp_path / "m.jsonl")
    assert row == {"step": 1, "a": float(np.float32(0.1)), "b": 0.1, "c": 7.0}
    assert isinstance(row["c"], float)


def test_the_file_is_strict_json(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.append(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    assert json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail) == {
        "step": 1,
        "a": "nan",
        "b": "inf",
        "c": "-inf",
    }


def test_a_line_is_out_when_append_returns(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    log.append(1, {"a": 1.0})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "a": 1.0}]
    log.sync()
    log.close()


def test_every_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    whole = write_steps(path, range(1, 4))
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert [row["step"] for row in read_metrics(path)] == [1, 2], whole[start:end]
    path.write_bytes(whole[:-1])
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3], "only the newline is missing"


@pytest.mark.parametrize(
    "line", ["{", "", "[1]", '{"a": 1.0}', '{"step": 2, "a": NaN}', '{"step": 2, "a": "x"}', '{"step": true}']
)
def test_a_broken_line_elsewhere_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match=r"m\.jsonl, line 2"):
        read_metrics(path)
    before = path.read_bytes()
    with pytest.raises(DataError, match="line 2"):
        MetricsLog.resume(path, 3)
    assert path.read_bytes() == before


def test_resume_drops_later_and_torn_lines_and_keeps_the_rest_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    whole = write_steps(path, range(1, 11))
    for end in (len(whole), len(whole) - 1, len(whole) - 7):
        path.write_bytes(whole[:end])
        with MetricsLog.resume(path, 6) as log:
            assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:6])
            for step in range(7, 11):
                log.append(step, {"train/loss": 1.0 / step})
        assert path.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_resume_gives_a_lost_newline_back(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    whole = write_steps(path, range(1, 4))
    path.write_bytes(whole[:-1])
    MetricsLog.resume(path, 3).close()
    assert path.read_bytes() == whole


def test_resume_leaves_a_fitting_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, range(1, 4))
    before = path.stat().st_ino
    MetricsLog.resume(path, 3).close()
    assert path.stat().st_ino == before


def test_resume_from_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsLog.resume(path, 5) as log:
        log.append(6, {})
    MetricsLog.resume(path, 0).close()
    assert path.read_bytes() == b""


def test_a_new_log_does_not_go_into_an_old_one(tmp_path: Path) -> None:
    write_steps(tmp_path / "m.jsonl", range(1, 2))
    with pytest.raises(RecipeError, match="resume that run"):
        MetricsLog(tmp_path / "m.jsonl")


def test_steps_only_rise(tmp_path: Path) -> None:
    write_steps(tmp_path / "m.jsonl", range(1, 4))
    with MetricsLog.resume(tmp_path / "m.jsonl", 3) as log, pytest.raises(AssertionError, match="step 3"):
        log.append(3, {})


def test_no_file_says_what_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="directory of a run"):
        read_metrics(tmp_path / "m.jsonl")
