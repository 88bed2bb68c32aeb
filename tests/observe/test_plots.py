from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from isotrain.observe.plots import BLUE, GREEN, ORANGE, PURPLE, RED, TIMING, plot_run


def rows(count: int) -> list[dict[str, float]]:
    noise = np.random.default_rng(0).normal(0, 0.05, count)
    made = []
    for step in range(1, count + 1):
        row = {"step": step, "train/loss": 3.0 * math.exp(-step / 50) + 1 + noise[step - 1]}
        row |= {"train/lr": 1e-3 * step / count, "train/grad_norm": 1.0 / step, "perf/throughput": 1000.0}
        if step % 20 == 0:
            row["val/loss"] = row["train/loss"] + 0.2
        made.append(row)
    return made


def pixels_of(image: np.ndarray, colour: str) -> int:
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int((np.abs(image[..., :3] - wanted).max(axis=-1) < 0.02).sum())


def test_the_curves_are_there(tmp_path: Path) -> None:
    files = plot_run(rows(200), tmp_path / "run" / "plots")
    assert [file.name for file in files] == ["loss.png", "training.png", "throughput.png"]
    for file in files:
        image = imread(file)
        assert image.shape[:2] == (700, 1200)
        assert 0.01 < float((image[..., :3].min(axis=-1) < 0.9).mean()) < 0.3, file
    loss = imread(files[0])
    assert pixels_of(loss, BLUE) > 1000 and pixels_of(loss, ORANGE) > 100 and pixels_of(loss, RED) == 0


@pytest.mark.parametrize("count", [1, 2, 49, 50])
def test_runs_of_any_length(tmp_path: Path, count: int) -> None:
    files = plot_run(rows(count), tmp_path, name="short")
    assert len(files) == 3
    assert pixels_of(imread(files[0]), BLUE) > 5


def test_steps_that_are_not_finite_are_marked(tmp_path: Path) -> None:
    metrics = rows(100)
    for step, value in ((30, math.nan), (60, math.inf)):
        metrics[step]["train/loss"] = metrics[step]["train/grad_norm"] = value
    files = plot_run(metrics, tmp_path)
    assert pixels_of(imread(files[0]), RED) > 20


def test_all_steps_not_finite(tmp_path: Path) -> None:
    metrics = [{"step": step, "train/loss": math.nan, "perf/throughput": math.nan} for step in range(1, 80)]
    assert len(plot_run(metrics, tmp_path)) == 2


def test_only_what_was_measured_is_drawn(tmp_path: Path) -> None:
    assert plot_run([], tmp_path) == []
    (file,) = plot_run([{"step": 5, "val/loss": 1.0}], tmp_path)
    assert file.name == "loss.png"


def online_rows(count: int) -> list[dict[str, float]]:
    made = []
    for step in range(1, count + 1):
        row = {"step": step, "critic/rewards/mean": step / count, "critic/score/mean": step / count + 0.1}
        row |= {"actor/kl_loss": 1e-3 * step, "actor/entropy": 0.5, "actor/pg_clipfrac": 0.01}
        row |= {"actor/grad_norm": 0.3, "actor/lr": 1e-6, "response_length/mean": 200.0}
        row |= {"training/rollout_probs_diff_mean": 0.004, "perf/throughput": 900.0}
        row |= {"timing_s/step": 10.0, "timing_s/gen": 5.0, "timing_s/update_actor": 3.0}
        if step % 10 == 0 or step == count:
            row["val-core/gsm8k/reward/mean@1"] = step / count
            row["timing_s/validate"] = 1.0
        made.append(row)
    return made


@pytest.mark.heavy
@pytest.mark.parametrize("count", [1, 80])
def test_curves_of_an_online_run(tmp_path: Path, count: int) -> None:
    files = {file.stem: imread(file) for file in plot_run(online_rows(count), tmp_path)}
    assert list(files) == ["reward", "policy", "rollout", "training", "timing", "throughput"]
    for image in files.values():
        assert image.shape[:2] == (700, 1200)
    assert min(pixels_of(files["reward"], colour) for colour in (BLUE, ORANGE)) > 5
    assert min(pixels_of(files["policy"], colour) for colour in (BLUE, GREEN, PURPLE)) > 5
    assert min(pixels_of(files["rollout"], colour) for colour in (BLUE, PURPLE)) > 5


@pytest.mark.parametrize("count", [10, 80])
def test_the_parts_of_a_step_are_stacked_in_proportion(tmp_path: Path, count: int) -> None:
    timing = [{name: row[name] for name in row if name[:4] in ("step", "timi")} for row in online_rows(count)]
    (file,) = plot_run(timing, tmp_path)
    image = imread(file)
    gen, update, other = (pixels_of(image, TIMING[part]) for part in ("gen", "update_actor", "other"))
    assert 1.5 < gen / update < 1.85
    assert gen > 50_000 and 0.25 < other / gen < 0.45


def test_responses_sampled_ahead_count_only_while_they_are_waited_for(tmp_path: Path) -> None:
    parts = {"timing_s/gen": 40.0, "timing_s/wait_for_batch": 5.0, "timing_s/update_actor": 5.0}
    (file,) = plot_run([{"step": step, "timing_s/step": 10.0, **parts} for step in range(1, 9)], tmp_path)
    image = imread(file)
    assert 0.9 < pixels_of(image, TIMING["gen"]) / pixels_of(image, TIMING["update_actor"]) < 1.1


def test_a_score_that_is_the_reward_is_drawn_once(tmp_path: Path) -> None:
    metrics = [{"step": step, "critic/rewards/mean": 1.0, "critic/score/mean": 1.0} for step in (1, 2)]
    (file,) = plot_run(metrics, tmp_path)
    assert file.name == "reward.png"
    assert pixels_of(imread(file), ORANGE) == 0 < pixels_of(imread(file), BLUE)


def test_online_steps_that_are_not_finite(tmp_path: Path) -> None:
    names = ("actor/entropy", "timing_s/gen", "timing_s/step")
    metrics = [dict.fromkeys(names, 1.0) | {"step": step} for step in range(1, 61)]
    metrics[20] |= dict.fromkeys(names, math.nan)
    policy, timing = plot_run(metrics, tmp_path)
    assert policy.name == "policy.png" and pixels_of(imread(policy), RED) > 20
    assert timing.name == "timing.png" and pixels_of(imread(timing), TIMING["gen"]) > 50_000


def test_pyplot_is_never_imported(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from isotrain.observe.plots import plot_run\n"
        "plot_run([{'step': 1, 'train/loss': 1.0}], pathlib.Path(sys.argv[1]))\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
