from __future__ import annotations

import math
from pathlib import Path

import pytest
from run_samples import csv_table, json_lines

from isotrain.errors import DataError
from isotrain.parity.run import Run
from isotrain.parity.sources.read import read_run


def curves(run: Run) -> dict[str, list[tuple[int, float]]]:
    return {
        name: list(zip(series.steps_S.tolist(), series.values_S.tolist(), strict=True))
        for name, series in run.metrics.items()
    }


def test_csv(tmp_path: Path) -> None:
    run = read_run(csv_table(tmp_path / "a.csv"))
    assert run.format == "CSV"
    assert curves(run) == {"loss": [(s, 1 / s) for s in range(1, 6)], "reward": [(2, 0.5), (4, 0.5)]}


@pytest.mark.parametrize(
    "text",
    [
        "step,loss\n1,0.5\n2,0.25",
        "\ufeffStep;loss\r\n1;0.5\r\n2;0.25\r\n",
        "loss\tglobal_step\n0.5\t1\n0.25\t2\n",
        '"_step","loss"\n"1","0.5"\n\n"2.0","0.25"\n',
        ",step,loss,\n0,1,0.5,x\n1,2,0.25,\n",
        "step,loss,when\n1,0.5,monday\n1,0.5,monday\n2,0.25,\n",
        "step,loss\n1,0.5\n2,0.25\n3",
    ],
)
@pytest.mark.parametrize("name", ["a.csv", "a.txt"])
def test_csv_dialects(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert curves(read_run(tmp_path / name)) == {"loss": [(1, 0.5), (2, 0.25)]}


def test_values_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("step,a,b\n1,nan,-inf\n")
    (tmp_path / "a.jsonl").write_text('{"step": 1, "a": NaN, "b": "-inf", "c": null}\n')
    for name in ("a.csv", "a.jsonl"):
        metrics = read_run(tmp_path / name).metrics
        assert set(metrics) == {"a", "b"}
        assert math.isnan(metrics["a"].values_S[0]) and metrics["b"].values_S[0] == -math.inf


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch,loss\n1,0.5\n", "line 1: no column step, global_step or _step in the header"),
        ("step,loss\n1.5,0.5\n", "line 2: step is not a whole number: '1.5'"),
        ("step,loss\n,0.5\n", "line 2: step is not a whole number: ''"),
        ("step,loss\n1e400,0.5\n", "line 2: step is not a whole number"),
        ("step,loss\n1,0.5,7\n2,1\n", "line 2: 3 cells, and the header has 2"),
        ("step,loss,loss\n1,0.5,0.5\n", "line 1: two columns are called 'loss'"),
        ("step,loss\n1,0.5\n2,oops\n", "line 3: column 'loss' holds text here"),
        ("step,loss\n1,0_5\n", "no metrics in it"),
        ("step,loss\n1,\n", "no metrics in it"),
        ('step,loss\n1,"0.5\n', "not CSV"),
        ("step,loss\n1,\udcff\n", "line 2: not UTF-8"),
        ("step,loss\n1," + "x" * 200_000 + "\n", "not CSV"),
    ],
)
def test_csv_errors(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=r"a\.csv") as error:
        read_run(tmp_path / "a.csv")
    assert message in str(error.value)


def test_jsonl(tmp_path: Path) -> None:
    run = read_run(json_lines(tmp_path / "a.jsonl"))
    assert run.format == "JSONL"
    assert curves(run) == {
        "loss": [(s, 1 / s) for s in range(1, 6)],
        "tokens": [(s, float(s)) for s in range(1, 6)],
    }


def test_jsonl_by_content_with_a_torn_end(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text('\n{"Step": 1.0, "a": 0.5, "b": [1], "c": {"d": 1}}\n{"Step": 2, "a": 1')
    assert curves(read_run(tmp_path / "a.log")) == {"a": [(1, 0.5)]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"epoch": 1, "a": 0.5}\n', "line 1: no step, global_step or _step in it"),
        ('{"step": 1, "a": 1}\n{"a": 0.5}\n', "line 2: step is not a whole number: 'None'"),
        ('{"step": true, "a": 0.5}\n', "line 1: step is not a whole number: 'True'"),
        ('{"step": 0.5, "a": 0.5}\n', "line 1: step is not a whole number: '0.5'"),
        ('{"step": 1, "a": 1}\n{"step": 2, "a": "x"}\n', "line 2: 'a' is no number here"),
        ('{"step": 1, "a": 1' + "0" * 400 + "}\n", "line 1: 'a' is too large"),
        ('{"step": 1, "a": 1' + "0" * 5000 + "}\n", "line 1: not JSON"),
        ('{"step": 1, "a": "x"}\n', "no metrics in it"),
        ('{"step": 1, "a": 1}\n\n[1]\n', "line 3: not a JSON object"),
        ('{"step": 1, "a": 1}\noops\n', "line 2: not JSON"),
        ('{"step": 1, "a": "\udcff"}\n', "line 1: not JSON"),
        ('{"step": 1, "a": "' + "x" * (5 << 20) + '"}\n', "line 1: longer than 4 MiB"),
    ],
)
def test_jsonl_errors(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=r"a\.jsonl") as error:
        read_run(tmp_path / "a.jsonl")
    assert message in str(error.value)
