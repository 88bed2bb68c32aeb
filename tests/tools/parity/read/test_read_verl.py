"""verl's logs; two real console logs (GPG on Qwen2-7B, NVIDIA GPUs, June 2025) are read as written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
from run_samples import verl_console, verl_file, verl_line

from isotrain.errors import DataError
from isotrain.tools.parity.compare.comparison import differences, recipe_changes
from isotrain.tools.parity.protocol import verdict_on
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.report.acceptance import accept
from isotrain.tools.parity.run import RunLog


def test_reads_a_console_log_behind_ray_and_colours(tmp_path: Path) -> None:
    run = read_run(verl_console(tmp_path / "train.log"))
    assert run.format == "verl console log"
    assert run.metrics["actor/pg_loss"].steps_S.tolist() == [1, 2, 3, 4, 5]
    assert run.metrics["actor/pg_loss"].values_S.tolist() == [0.1 / (step + 1) for step in range(1, 6)]
    assert run.metrics["timing_s/gen"].values_S[0] == 21.5
    assert run.metrics["val-core/openai/gsm8k/reward/mean@1"].steps_S.tolist() == [0]
    assert math.isnan(run.metrics["actor/kl"].values_S[0])
    assert set(run.sha256) == {"train.log"}


def test_reads_the_older_format_with_three_decimals(tmp_path: Path) -> None:
    # From verl's quickstart page.
    (tmp_path / "log").write_text(
        "step:0 - timing/gen:21.470 - critic/vpred_mean:-2.056 - critic/lr(1e-4):0.100\n"
        "(main_task pid=51520, ip=10.0.0.2) step:1 - timing/gen:23.020 - val/test_score/openai/gsm8k:0.171\n"
    )
    run = read_run(tmp_path / "log")
    assert run.metrics["critic/lr(1e-4)"].values_S.tolist() == [0.1]
    assert run.metrics["timing/gen"].values_S.tolist() == [21.47, 23.02]


def test_reads_a_bar_before_the_step_and_two_lines_of_one_step(tmp_path: Path) -> None:
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
def test_refuses_wrong_console_lines(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "train.log").write_text(f"{verl_line(1)}\n{line}\n")
    with pytest.raises(DataError, match=r"train\.log") as error:
        read_run(tmp_path / "train.log")
    assert message in str(error.value)


def test_reads_a_file_log(tmp_path: Path) -> None:
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
def test_refuses_wrong_file_lines(tmp_path: Path, line: str, message: str) -> None:
    path = verl_file(tmp_path / "x.jsonl")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"x\.jsonl, line 6") as error:
        read_run(path)
    assert message in str(error.value)


FSDP, MEGATRON = "gpg-qwen2-7b-fsdp.log", "gpg-qwen2-7b-megatron.log"
GSM8K, MATH = (
    "val-core/openai/gsm8k/reward/mean@1",
    "val-core/DigitalLearningGmbH/MATH-lighteval/reward/mean@1",
)

# Read off the lines `step:1 - ...` and the last one of each file.
FIRST_AND_LAST = {
    FSDP: {
        "critic/rewards/mean": (0.433, 0.937),
        "actor/pg_loss": (-0.034, 0.0),
        "actor/grad_norm": (0.322, 0.034),
        "timing_s/step": (252.485, 705.786),
        "perf/throughput": (1036.956, 678.920),
        "perf/max_memory_allocated_gb": (66.088, 76.664),
        "training/rollout_probs_diff_mean": (0.003, 0.001),
        "perf/total_num_tokens": (2094523.0, 3833379.0),
    },
    MEGATRON: {
        "critic/rewards/mean": (0.259, 0.987),
        "actor/pg_loss": (-0.027, -0.002),
        "actor/grad_norm": (1.295, 0.068),
        "timing_s/step": (227.854, 418.549),
        "perf/throughput": (821.911, 382.540),
        "training/rollout_probs_diff_mean": (0.003, 0.003),
        "perf/total_num_tokens": (1498208.0, 1280896.0),
    },
}


@pytest.fixture(scope="module")
def runs(shared_data: Path) -> dict[str, RunLog]:
    folder = shared_data / "verl-logs"
    if not folder.is_dir():
        pytest.skip(f"no logs of verl at {folder}")
    return {name: read_run(folder / name) for name in (FSDP, MEGATRON)}


@pytest.mark.parametrize(("name", "steps"), [(FSDP, 210), (MEGATRON, 105)])
def test_reads_all_steps_of_published_logs(runs: dict[str, RunLog], name: str, steps: int) -> None:
    run = runs[name]
    assert run.format == "verl console log" and run.notes == () and run.planned_steps == steps
    for metric, (first, last) in FIRST_AND_LAST[name].items():
        series = run.metrics[metric]
        assert series.steps_S.tolist() == list(range(1, steps + 1)), metric
        assert (series.values_S[0], series.values_S[-1]) == (first, last), metric


def test_reads_validations_of_published_logs(runs: dict[str, RunLog]) -> None:
    gsm8k, maths = runs[FSDP].metrics[GSM8K], runs[FSDP].metrics[MATH]
    assert gsm8k.steps_S.tolist() == maths.steps_S.tolist() == list(range(0, 211, 5))
    assert gsm8k.values_S[[0, 1, -1]].tolist() == [0.221, 0.864, 0.879]
    assert maths.values_S[[0, 1, -1]].tolist() == [0.514, 0.532, 0.499]
    other = runs[MEGATRON].metrics[GSM8K]
    assert other.steps_S.tolist() == list(range(0, 106, 5))
    assert other.values_S[[0, 1, -1]].tolist() == [0.212, 0.874, 0.880]


def test_every_metric_is_read(runs: dict[str, RunLog]) -> None:
    """53 and 50 in the line of step 1; validations, their time and that of checkpoints in later ones."""
    assert (len(runs[FSDP].metrics), len(runs[MEGATRON].metrics)) == (53 + 4, 50 + 3)


def test_the_nightly_rule(runs: dict[str, RunLog]) -> None:
    """Other data and another back end. The means were computed from the text with awk."""
    found = accept("verl-ascend-nightly", runs[FSDP], runs[MEGATRON])
    told = [(line.status, line.reference, line.candidate, line.measured) for line in found.lines]
    assert told == [
        ("broken", pytest.approx(0.7989), pytest.approx(0.9451), "+0.1462"),
        ("not in the logs", pytest.approx(0.003), pytest.approx(0.003), "+0 %"),
        ("broken", pytest.approx(908.6289), pytest.approx(798.8194), "-12.09 %"),
        ("holds", pytest.approx(255.2976), pytest.approx(218.9559), "-14.24 %"),
        ("not in the logs", 76.664, None, ""),
    ]
    assert found.lines[1].remark == "logged with three decimals, which may be 17 % of it"
    assert found.lines[4].remark == "`actor/perf/max_memory_allocated_gb` missing in the candidate"


def test_the_rule_of_the_tasks(runs: dict[str, RunLog]) -> None:
    found = accept("verl-ascend-task", runs[FSDP], runs[MEGATRON])
    assert [(line.status, line.measured) for line in found.lines] == [
        ("holds", "105 steps, 6.58 h"),
        ("holds", "0.8187 in the first 10 steps, 0.9848 in the last"),
        ("broken", "9.69 % absolute (verl's formula), 11.4 % relative"),
        ("holds", "0.3 % absolute (verl's formula), 0.342 % relative"),
        ("not in the logs", "0.825 x"),  # both are GPUs, and the logs do not say so
    ]
    assert found.accepted is False
    assert "over 105 steps in common" in found.lines[2].remark
    assert "at step 105, the worst of 1; not a separate evaluation" in found.lines[3].remark
    assert "do not name the devices" in found.lines[4].remark


def test_the_printed_configurations_are_compared(runs: dict[str, RunLog]) -> None:
    """The two were trained on other data, with another reward, schedule and number of steps."""
    assert all(run.settings is not None for run in runs.values())
    (difference,) = differences(runs[FSDP], runs[MEGATRON])
    changed = {line.partition(":")[0] for line in recipe_changes(runs[FSDP], runs[MEGATRON])}
    assert difference.message.startswith("the printed configurations differ: data.train: ")
    assert {"data.train", "data.validation", "optimizer.schedule", "trainer.steps"} <= changed
    # Both name Qwen2-7B-Instruct, one in the Hub's cache; sharding, offloading and micro-batches are free.
    assert changed - {"data.train", "data.validation", "optimizer.schedule", "trainer.steps"} == {
        "reward.gsm8k",
        "reward.function",
    }
    assert not list(differences(runs[FSDP], runs[FSDP]))


def printed(**changed: Any) -> str:
    """A configuration as verl prints it, behind the name of a Ray worker."""
    trainer = {
        "project_name": "p",
        "experiment_name": "e",
        "total_epochs": 1,
        "nnodes": 1,
        "n_gpus_per_node": 8,
    }
    data = {"train_files": "gsm8k/train.parquet", "val_files": "gsm8k/test.parquet", "train_batch_size": 64}
    actor = {"ppo_mini_batch_size": 32, "optim": {"lr": changed.pop("lr", 1e-6)}}
    config = {
        "data": {**data, **changed},
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": trainer,
        "actor_rollout_ref": {"actor": actor, "model": {"path": "Qwen/Qwen3-8B"}, "rollout": {"n": 5}},
    }
    return f"(TaskRunner pid=7) {pformat(config)}\n(TaskRunner pid=7) Total training steps: 9\n"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"lr": 2e-6}, "optimizer.lr: 1e-06 -> 2e-06"),
        ({"train_batch_size": 128}, "data.batch_size: 64 -> 128"),
        ({"train_files": "math/train.parquet"}, "data.train"),
        ({"train_files": "/elsewhere/gsm8k/train.parquet"}, None),
        ({"invented": 3}, "verl.data.invented: (absent) -> 3"),
    ],
)
def test_a_changed_setting_is_another_training(
    tmp_path: Path, changed: dict[str, Any], field: str | None
) -> None:
    for name, config in (("a", printed()), ("b", printed(**changed))):
        (tmp_path / name).write_text(config + "".join(verl_line(step) + "\n" for step in range(1, 6)))
    verdict = verdict_on(tmp_path / "a", tmp_path / "b")
    lines = recipe_changes(verdict.comparison.reference, verdict.comparison.candidate)
    if field is None:
        assert lines == [] and not verdict.computation.inputs
    else:
        assert lines[0].startswith(field)
        differs = "Computation: different. the printed configurations differ: " + field
        assert verdict.words.splitlines()[1].startswith(differs)
        allowed = verdict_on(tmp_path / "a", tmp_path / "b", allow=["recipe"])
        assert allowed.computation.verdict != "different" and allowed.comparison.allowed


def test_a_configuration_that_is_too_long_loses_no_line_in_its_middle(tmp_path: Path) -> None:
    """What follows a line that is too long would make it another configuration."""
    config = printed().replace("\n 'data'", ("\n" + "x" * (64 << 10)) * 80 + "\n 'data'")
    assert len(config) > 5 << 20
    (tmp_path / "a").write_text(config + "".join(verl_line(step) + "\n" for step in range(1, 6)))
    run = read_run(tmp_path / "a")
    assert run.settings is None and "is not compared" in run.notes[0]


def test_a_configuration_that_cannot_be_imported_is_a_note(tmp_path: Path) -> None:
    endless = "(T pid=7) {'data': {" + "'x': 1, " * 80_000
    (tmp_path / "a").write_text(f"{endless}\n{verl_line(1)}\n")
    run = read_run(tmp_path / "a")
    assert run.settings is None
    assert run.notes == (
        "the printed configuration is not compared: 'line 1: the printed configuration has no end'",
    )
