"""Console logs of two real verl runs (GPG on Qwen2-7B, NVIDIA GPUs, June 2025) are read as written."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotrain.parity.acceptance import accept
from isotrain.parity.run import Run
from isotrain.parity.sources.read import read_run

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
def runs(shared_data: Path) -> dict[str, Run]:
    folder = shared_data / "verl-logs"
    if not folder.is_dir():
        pytest.skip(f"no logs of verl at {folder}")
    return {name: read_run(folder / name) for name in (FSDP, MEGATRON)}


@pytest.mark.parametrize(("name", "steps"), [(FSDP, 210), (MEGATRON, 105)])
def test_steps_and_values(runs: dict[str, Run], name: str, steps: int) -> None:
    run = runs[name]
    assert run.format == "verl console log" and run.notes == ()
    for metric, (first, last) in FIRST_AND_LAST[name].items():
        series = run.metrics[metric]
        assert series.steps_S.tolist() == list(range(1, steps + 1)), metric
        assert (series.values_S[0], series.values_S[-1]) == (first, last), metric


def test_validations(runs: dict[str, Run]) -> None:
    gsm8k, maths = runs[FSDP].metrics[GSM8K], runs[FSDP].metrics[MATH]
    assert gsm8k.steps_S.tolist() == maths.steps_S.tolist() == list(range(0, 211, 5))
    assert gsm8k.values_S[[0, 1, -1]].tolist() == [0.221, 0.864, 0.879]
    assert maths.values_S[[0, 1, -1]].tolist() == [0.514, 0.532, 0.499]
    other = runs[MEGATRON].metrics[GSM8K]
    assert other.steps_S.tolist() == list(range(0, 106, 5))
    assert other.values_S[[0, 1, -1]].tolist() == [0.212, 0.874, 0.880]


def test_every_metric_is_read(runs: dict[str, Run]) -> None:
    """53 and 50 in the line of step 1; validations, their time and that of checkpoints in later ones."""
    assert (len(runs[FSDP].metrics), len(runs[MEGATRON].metrics)) == (53 + 4, 50 + 3)


def test_the_nightly_rule(runs: dict[str, Run]) -> None:
    """Other data and another back end. The means were computed from the text with awk."""
    found = accept("verl-ascend-nightly", runs[FSDP], runs[MEGATRON])
    told = [(line.status, line.reference, line.candidate, line.measured.en) for line in found.lines]
    assert told == [
        ("broken", pytest.approx(0.7989), pytest.approx(0.9451), "+0.1462"),
        ("not in the logs", pytest.approx(0.003), pytest.approx(0.003), "+0 %"),
        ("broken", pytest.approx(908.6289), pytest.approx(798.8194), "-12.09 %"),
        ("holds", pytest.approx(255.2976), pytest.approx(218.9559), "-14.24 %"),
        ("not in the logs", 76.664, None, ""),
    ]
    assert found.lines[1].remark.en == "logged with three decimals, which may be 17 % of it"
    assert found.lines[4].remark.en == "`actor/perf/max_memory_allocated_gb` missing in the candidate"


def test_the_rule_of_the_tasks(runs: dict[str, Run]) -> None:
    found = accept("verl-ascend-task", runs[FSDP], runs[MEGATRON])
    assert [(line.status, line.measured.en) for line in found.lines] == [
        ("holds", "105 steps, 6.58 h"),
        ("holds", "0.8187 in the first 10 steps, 0.9848 in the last"),
        ("broken", "9.69 % absolute (verl's formula), 11.4 % relative"),
        ("holds", "0.3 % absolute (verl's formula), 0.342 % relative"),
        ("not in the logs", "0.825 x"),  # both are GPUs, and the logs do not say so
    ]
    assert found.accepted is False
    assert "over 105 steps in common" in found.lines[2].remark.en
    assert "at step 105, the worst of 1; not a separate evaluation" in found.lines[3].remark.en
    assert "do not name the devices" in found.lines[4].remark.en
