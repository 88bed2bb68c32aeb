"""CSV and JSONL as wandb and SwanLab export them.

wandb's columns were taken from public scripts that read its exports, SwanLab's from its package's sources.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from isotrain.errors import DataError
from isotrain.parity.run import Run
from isotrain.parity.sources.read import read_run


def read(tmp_path: Path, text: str, name: str = "export.csv") -> Run:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return read_run(tmp_path / name)


def curves(run: Run) -> dict[str, list[tuple[int, float]]]:
    return {
        name: list(zip(series.steps_S.tolist(), series.values_S.tolist(), strict=True))
        for name, series in run.metrics.items()
    }


def chart(*columns: str, axis: str = "Step") -> str:
    return (
        ",".join([f'"{axis}"', *(f'"{name}{end}"' for name in columns for end in ("", "__MIN", "__MAX"))])
        + "\n"
    )


def test_a_chart_of_wandb(tmp_path: Path) -> None:
    run = read(
        tmp_path,
        chart("imperial-droid-52 - train/loss", "imperial-droid-52 - val")
        + '"1","0.5","0.5","0.5","","",""\n"2","0.25","0.25","0.25","0.75","0.75","0.75"\n',
    )
    assert run.format == "wandb chart export"
    assert curves(run) == {"train/loss": [(1, 0.5), (2, 0.25)], "val": [(2, 0.75)]}
    assert run.notes == ("run 'imperial-droid-52'",)


def test_points_that_are_averages_are_said_to_be(tmp_path: Path) -> None:
    run = read(tmp_path, chart("r - loss") + '"0","0.5","0.25","0.75"\n"8","0.5","0.5","0.5"\n')
    assert curves(run) == {"loss": [(0, 0.5), (8, 0.5)]}
    assert run.notes[1].startswith("1 of 2 points are averages over several steps")


def test_another_axis_of_wandb(tmp_path: Path) -> None:
    text = chart("r - _step", "r - train/loss", axis="train/global_step")
    run = read(tmp_path, text + '"10","3","3","3","0.5","0.5","0.5"\n"20","6","6","6","0.25","0.25","0.25"\n')
    assert curves(run) == {"train/loss": [(10, 0.5), (20, 0.25)]}
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
def test_a_history_of_wandb(tmp_path: Path, name: str, text: str) -> None:
    assert curves(read(tmp_path, text, name)) == {"train/loss": [(1, 0.5), (2, 0.25)]}


def swanlab(*names: str) -> str:
    return ",".join(["step", *(f"{name}{end}" for name in names for end in ("_step", "_timestamp"))]) + "\n"


def test_an_export_of_swanlab(tmp_path: Path) -> None:
    """The values are in the columns that end with `_step`."""
    run = read(tmp_path, swanlab("t0707-02:17-loss") + "1,0.5,1752000000000\n2,0.25,1752000001000\n")
    assert run.format == "SwanLab export" and run.notes == ("experiment 't0707-02:17'",)
    assert curves(run) == {"loss": [(1, 0.5), (2, 0.25)]}


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


def test_a_table_of_swanlabs_older_interface(tmp_path: Path) -> None:
    assert set(read(tmp_path, "step,loss,loss_timestamp\n1,0.5,1752000000000\n").metrics) == {"loss"}


def test_columns_that_look_alike_are_metrics(tmp_path: Path) -> None:
    run = read(tmp_path, "step,env_step,loss__MIN,wall_timestamp\n1,2,3,4\n")
    assert run.format == "CSV" and set(run.metrics) == {"env_step", "loss__MIN", "wall_timestamp"}
