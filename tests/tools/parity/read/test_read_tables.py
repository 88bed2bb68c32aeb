"""CSV and JSONL, also as wandb and SwanLab export them.

wandb's columns were taken from public scripts that read its exports, SwanLab's from its package's sources.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from run_samples import csv_table, json_lines

from isotrain.errors import DataError
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.run import RunLog


def curves(run: RunLog) -> dict[str, list[tuple[int, float]]]:
    return {
        name: list(zip(series.steps_S.tolist(), series.values_S.tolist(), strict=True))
        for name, series in run.metrics.items()
    }


def test_reads_csv(tmp_path: Path) -> None:
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
def test_reads_dialects_of_csv(tmp_path: Path, text: str, name: str) -> None:
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
def test_refuses_wrong_csv(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=r"a\.csv") as error:
        read_run(tmp_path / "a.csv")
    assert message in str(error.value)


def test_reads_jsonl(tmp_path: Path) -> None:
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
def test_refuses_wrong_jsonl(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=r"a\.jsonl") as error:
        read_run(tmp_path / "a.jsonl")
    assert message in str(error.value)


def read(tmp_path: Path, text: str, name: str = "export.csv") -> RunLog:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return read_run(tmp_path / name)


def exported_curves(run: RunLog) -> dict[str, list[tuple[int, float]]]:
    return {
        name: list(zip(series.steps_S.tolist(), series.values_S.tolist(), strict=True))
        for name, series in run.metrics.items()
    }


def chart(*columns: str, axis: str = "Step") -> str:
    return (
        ",".join([f'"{axis}"', *(f'"{name}{end}"' for name in columns for end in ("", "__MIN", "__MAX"))])
        + "\n"
    )


def test_reads_a_chart_of_wandb(tmp_path: Path) -> None:
    run = read(
        tmp_path,
        chart("imperial-droid-52 - train/loss", "imperial-droid-52 - val")
        + '"1","0.5","0.5","0.5","","",""\n"2","0.25","0.25","0.25","0.75","0.75","0.75"\n',
    )
    assert run.format == "wandb chart export"
    assert exported_curves(run) == {"train/loss": [(1, 0.5), (2, 0.25)], "val": [(2, 0.75)]}
    assert run.notes == ("run 'imperial-droid-52'",)


def test_points_that_are_averages_are_said_to_be(tmp_path: Path) -> None:
    run = read(tmp_path, chart("r - loss") + '"0","0.5","0.25","0.75"\n"8","0.5","0.5","0.5"\n')
    assert exported_curves(run) == {"loss": [(0, 0.5), (8, 0.5)]}
    assert run.notes[1].startswith("1 of 2 points are averages over several steps")


def test_reads_another_axis_of_wandb(tmp_path: Path) -> None:
    text = chart("r - _step", "r - train/loss", axis="train/global_step")
    run = read(tmp_path, text + '"10","3","3","3","0.5","0.5","0.5"\n"20","6","6","6","0.25","0.25","0.25"\n')
    assert exported_curves(run) == {"train/loss": [(10, 0.5), (20, 0.25)]}
    with pytest.raises(DataError, match=r"line 2: step is not a whole number: '1\.5'"):
        read(tmp_path, chart("r - loss", axis="Relative Time (Process)") + '"1.5","3","3","3"\n')


def test_names_with_the_separator_in_them(tmp_path: Path) -> None:
    row = '"1",' + ",".join(['"0.5"'] * 6) + "\n"
    assert set(read(tmp_path, chart("a - b - loss", "a - b - reward") + row).metrics) == {"loss", "reward"}
    assert set(read(tmp_path, chart("a - x", "a - eval - acc") + row).metrics) == {"x", "eval - acc"}


@pytest.mark.parametrize(
    "names", [("a - loss", "b - loss"), ("x - a - loss", "x - b - loss"), ("a - x", "b - y")]
)
def test_a_chart_of_two_runs_is_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    with pytest.raises(DataError, match="line 1: columns of 2 runs"):
        read(tmp_path, chart(*names) + '"1",' + ",".join(['"0.5"'] * 6) + "\n")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("history.csv", ",_step,_runtime,_timestamp,train/loss\n0,1,3.5,1.7e9,0.5\n1,2,,1.7e9,0.25\n"),
        (
            "history.jsonl",
            '{"_step": 1, "_runtime": 3.5, "_timestamp": 1.7e9, "train/loss": 0.5, "_wandb": {"a": 3}}\n'
            '{"_step": 2, "_runtime": 4, "_timestamp": 1.7e9, "train/loss": 0.25, "train/epoch": null}\n',
        ),
    ],
)
def test_reads_a_history_of_wandb(tmp_path: Path, name: str, text: str) -> None:
    assert exported_curves(read(tmp_path, text, name)) == {"train/loss": [(1, 0.5), (2, 0.25)]}


def swanlab(*names: str) -> str:
    return ",".join(["step", *(f"{name}{end}" for name in names for end in ("_step", "_timestamp"))]) + "\n"


def test_reads_an_export_of_swanlab(tmp_path: Path) -> None:
    """The values are in the columns that end with `_step`."""
    run = read(tmp_path, swanlab("t0707-02:17-loss") + "1,0.5,1752000000000\n2,0.25,1752000001000\n")
    assert run.format == "SwanLab export" and run.notes == ("experiment 't0707-02:17'",)
    assert exported_curves(run) == {"loss": [(1, 0.5), (2, 0.25)]}


@pytest.mark.parametrize(
    ("names", "metrics"),
    [
        (
            ("qwen-grpo-critic/rewards/mean", "qwen-grpo-actor/pg_loss"),
            {"critic/rewards/mean", "actor/pg_loss"},
        ),
        (("qwen-grpo-reward", "qwen-grpo-val-core/gsm8k/acc"), {"reward", "val-core/gsm8k/acc"}),
        (("q-val-core/a", "q-val-aux/b"), {"val-core/a", "val-aux/b"}),
        (("q-1-reward", "q-1-actor/kl-loss"), {"reward", "actor/kl-loss"}),
    ],
)
def test_names_of_swanlab(tmp_path: Path, names: tuple[str, ...], metrics: set[str]) -> None:
    assert set(read(tmp_path, swanlab(*names) + "1,0.5,1752000000000,0.25,\n").metrics) == metrics


@pytest.mark.parametrize("names", [("a-loss", "b-loss"), ("run-1-loss", "run-2-loss"), ("a-x", "b-y")])
def test_an_export_of_two_experiments_is_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    with pytest.raises(DataError, match="line 1: columns of 2 runs"):
        read(tmp_path, swanlab(*names) + "1,0.5,1,0.5,1\n")


def test_reads_a_table_of_swanlabs_older_interface(tmp_path: Path) -> None:
    assert set(read(tmp_path, "step,loss,loss_timestamp\n1,0.5,1752000000000\n").metrics) == {"loss"}


def test_columns_that_look_alike_are_metrics(tmp_path: Path) -> None:
    run = read(tmp_path, "step,env_step,loss__MIN,wall_timestamp\n1,2,3,4\n")
    assert run.format == "CSV" and set(run.metrics) == {"env_step", "loss__MIN", "wall_timestamp"}
