from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from run_samples import verl_console, verl_file, verl_line

from isotrain.errors import DataError
from isotrain.parity.sources.read import read_run


def test_console_log_behind_ray_and_colours(tmp_path: Path) -> None:
    run = read_run(verl_console(tmp_path / "train.log"))
    assert run.format == "verl console log"
    assert run.metrics["actor/pg_loss"].steps_S.tolist() == [1, 2, 3, 4, 5]
    assert run.metrics["actor/pg_loss"].values_S.tolist() == [0.1 / (step + 1) for step in range(1, 6)]
    assert run.metrics["timing_s/gen"].values_S[0] == 21.5
    assert run.metrics["val-core/openai/gsm8k/reward/mean@1"].steps_S.tolist() == [0]
    assert math.isnan(run.metrics["actor/kl"].values_S[0])
    assert set(run.sha256) == {"train.log"}


def test_the_older_format_with_three_decimals(tmp_path: Path) -> None:
    # From verl's quickstart page.
    (tmp_path / "log").write_text(
        "step:0 - timing/gen:21.470 - critic/vpred_mean:-2.056 - critic/lr(1e-4):0.100\n"
        "(main_task pid=51520, ip=10.0.0.2) step:1 - timing/gen:23.020 - val/test_score/openai/gsm8k:0.171\n"
    )
    run = read_run(tmp_path / "log")
    assert run.metrics["critic/lr(1e-4)"].values_S.tolist() == [0.1]
    assert run.metrics["timing/gen"].values_S.tolist() == [21.47, 23.02]


def test_a_bar_before_the_step_and_two_lines_of_one_step(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "Epoch 1/1: 1%| | 1/9 [00:01<00:09, 1.0s/it]step:1 - train/loss:0.5 - train/total_tokens(B):1e-05\r\n"
        "step:1 - val/loss:np.float32(0.25)\nstep:1 - train/loss:0.5\n"
    )
    metrics = read_run(tmp_path / "log").metrics
    assert {name: series.values_S.tolist() for name, series in metrics.items()} == {
        "train/loss": [0.5],
        "train/total_tokens(B)": [1e-05],
        "val/loss": [0.25],
    }


def test_what_a_model_says_is_no_step(tmp_path: Path) -> None:
    response = "step:3 - we add: 4\nfirst step:4 - so 5\nsubstep:9 - a:1\n"
    (tmp_path / "log").write_text(response + verl_line(1) + "\n" + response)
    assert read_run(tmp_path / "log").metrics["actor/pg_loss"].steps_S.tolist() == [1]


def test_a_last_line_without_an_end_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(verl_line(1) + "\nstep:2 - actor/pg_loss:0.1")
    assert len(read_run(tmp_path / "log").metrics["actor/pg_loss"]) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("step:2 - a:1 - a:2", "line 2: step 2 of a is 2.0 here and 1.0 before"),
        ("step:1.5 - actor/lr:2e-06", "line 2: step is not a whole number: '1.5'"),
        ("step:99999999999999999999 - a:1", "line 2: step is not a whole number"),
        (
            "step:2 - a:1 - b:0.(Worker pid=3) hello",
            "line 2: 'b:0.(Worker pid=3) hello' is not `name:number`",
        ),
        ("step:2 - " + "x" * 600 + ":1", "line 2: 'xxx"),
    ],
)
def test_console_errors(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "train.log").write_text(f"{verl_line(1)}\n{line}\n")
    with pytest.raises(DataError, match=r"train\.log") as error:
        read_run(tmp_path / "train.log")
    assert message in str(error.value)


def test_file_log(tmp_path: Path) -> None:
    run = read_run(verl_file(tmp_path / "experiment.jsonl"))
    assert run.format == "verl file log"
    assert run.metrics["actor/pg_loss"].values_S.tolist() == [0.1 / step for step in range(1, 6)]
    # orjson writes NaN as null.
    assert all(math.isnan(value) for value in run.metrics["actor/kl"].values_S)


def test_file_log_of_older_versions_writes_nan_by_name(tmp_path: Path) -> None:
    rows = [{"step": 1, "data": {"a": math.nan, "b": -math.inf, "c": True, "d": "text", "e": [1]}}]
    (tmp_path / "x").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = read_run(tmp_path / "x").metrics
    assert math.isnan(metrics["a"].values_S[0]) and metrics["b"].values_S[0] == -math.inf
    assert metrics["c"].values_S[0] == 1 and set(metrics) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": "x", "data": {}}', "step is not a whole number: 'x'"),
        ('{"step": 6}', 'no "step" and "data"'),
        ("nonsense", "not JSON"),
    ],
)
def test_file_errors(tmp_path: Path, line: str, message: str) -> None:
    path = verl_file(tmp_path / "x.jsonl")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"x\.jsonl, line 6") as error:
        read_run(path)
    assert message in str(error.value)
