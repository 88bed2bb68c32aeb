"""Online runs on a real Ray with the reference engine: numbers, exact resume, records, ranks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from online_runs import OnlineRun, online_recipe, run_online
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.data.prepare.tiny_reward import score
from isotrain.data.record import read_trajectories
from isotrain.observe.metrics import read_metrics
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.schema import MeshSection, Recipe
from support import stable_metrics

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("online")


def saving(tiny: Path, output: Path, device_type: str = "cpu") -> Recipe:
    validation = str(tiny / "prompts-validation.jsonl")
    return online_recipe(
        tiny,
        output,
        device_type,
        data={
            "train": str(tiny / "prompts.jsonl"),
            "validation": validation,
            "validation_rows": 3,
            "batch_size": 4,
            "max_length": 64,
            "tokens_per_micro_batch": 256,
        },
        rollout={"engine": "hf", "n": 4, "max_tokens": 6, "record": True},
        trainer={"steps": 5, "save_every": 1, "validate_every": 2, "validate_first": True},
    )


@pytest.fixture(scope="module")
def whole(tiny: Path, work: Path) -> Path:
    """A run that nobody touched."""
    return run_online(saving(tiny, work / "whole"), work, "whole")


def test_the_run_says_once_where_responses_end(whole: Path) -> None:
    assert (whole / "log.txt").read_text().count("responses end at '<|im_end|>' (2)\n") == 1


def test_the_run_says_and_records_which_way_weights_go(whole: Path) -> None:
    (start,) = RunDirectory(whole).starts()
    assert start["device"]["rollout"]["weights by"] == "file"
    assert "weights by file" in (whole / "log.txt").read_text()


def test_the_first_update_is_on_policy(whole: Path) -> None:
    before, *rows = read_metrics(whole / "metrics.jsonl")
    assert before["step"] == 0 and any(name.startswith("val-core/") for name in before)
    assert "actor/ppo_kl" not in before
    for row in rows:
        assert row["actor/ppo_kl"] == 0.0 and row["actor/pg_clipfrac"] == 0.0
        # Engine and trainer run the same kernels in batches of other sizes.
        assert row["training/rollout_probs_diff_max"] < 1e-5
        assert row["rollout/weight_check_diff"] < 1e-5
        assert row["rollout/staleness/max"] == 0.0
        assert row["reward/failures"] == 0.0
        assert row["critic/advantages/mean"] == pytest.approx(0.0, abs=0.2)


def test_an_evaluation_of_a_checkpoint_has_the_score_of_its_validation(whole: Path, work: Path) -> None:
    """The same prompts, seeds, rewards and means: to the last bit."""
    rows = read_metrics(whole / "metrics.jsonl")
    validated = {row["step"]: row.get("val-core/data/reward/mean@1") for row in rows}
    out = work / "evaluated"
    arguments = ["evaluate", str(whole), "--steps", "4,5", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    results = json.loads((out / "step-4" / "results.json").read_text())["results"]["data"]
    assert results["metrics"]["mean@1"]["mean"] == validated[4] is not None
    assert (out / "step-5" / "results.json").exists() and (out / "curve.png").exists()


@pytest.mark.slow
def test_nothing_moves_without_a_learning_rate(tiny: Path, work: Path) -> None:
    """Several updates a step are compared with log-probs from before the first: here these are the same."""
    recipe = online_recipe(
        tiny,
        work / "still",
        algorithm={"name": "grpo", "mini_batch_size": 2, "ppo_epochs": 2, "kl": {"place": "loss"}},
        optimizer={"lr": 0.0, "schedule": "constant", "warmup_ratio": 0.0},
        trainer={"steps": 2, "validate_first": True},
        data={
            "train": str(tiny / "prompts.jsonl"),
            "validation": str(tiny / "prompts-validation.jsonl"),
            "validation_rows": 3,
            "batch_size": 4,
            "max_length": 64,
            "tokens_per_micro_batch": 96,
        },
        rollout={"engine": "hf", "n": 4, "max_tokens": 6},
    )
    before, *rows = read_metrics(run_online(recipe, work, "still") / "metrics.jsonl")
    assert rows
    for row in rows:
        assert row["timing_s/old_log_prob"] > 0
        assert row["actor/ppo_kl"] == 0.0 and row["actor/pg_clipfrac"] == 0.0 and row["actor/kl_loss"] == 0.0
        # The engine has the same kernels, but pads, and its batches have other sizes.
        assert row["training/rollout_logp_diff_mean"] < 1e-5
    for row in (before, rows[-1]):
        assert row["val-core/data/reward/mean@1"] == pytest.approx(greedy_score(tiny, rows=3))


def greedy_score(tiny: Path, rows: int) -> float:
    """The mean reward of the untrained model's greedy responses, as transformers alone gives them."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    lines = (tiny / "prompts-validation.jsonl").read_text().splitlines()[:rows]
    scores = []
    for row in map(json.loads, lines):
        prompt = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        whole = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0]
        response = tokenizer.decode(whole[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        scores.append(score(response, row["answer"]))
    return sum(scores) / len(scores)


def test_a_killed_run_goes_on_exactly(tiny: Path, work: Path, whole: Path) -> None:
    recipe = saving(tiny, work / "killed")
    first = OnlineRun(recipe, work, "killed-1")
    first.wait_for_steps(3)
    os.kill(first.process.pid, signal.SIGKILL)
    first.wait()
    second = OnlineRun(recipe, work, "killed-2")
    run = second.finish()
    assert "resuming after step" in second.text
    assert stable_metrics(run) == stable_metrics(whole)
    assert drawn(run) == drawn(whole)


def drawn(run: Path) -> list[tuple[int, int, int]]:
    """Every response that was learnt from: its draw, its prompt, its number; of all steps in order."""
    files = sorted((run / "trajectories").glob("*.parquet"))
    records = [record.trajectory for file in files for record in read_trajectories(file)]
    return sorted((t.prompt_index, t.row, t.sample) for t in records)


def test_every_draw_is_learnt_from_once(whole: Path) -> None:
    assert [prompt_index for prompt_index, _, sample in drawn(whole) if sample == 0] == list(range(5 * 4))
    assert len(drawn(whole)) == 5 * 4 * 4


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("on", ["cpu", "npu"])
def test_two_ranks_do_what_one_does(tiny: Path, work: Path, whole: Path, on: str, context: int) -> None:
    """On the simulated device, the cluster has NPUs, ranks exchange over hccl, and masks are Ascend's."""
    name = f"two-{on}-{context}"
    recipe = saving(tiny, work / name, on)
    over_two = {"ranks": 2, "mesh": MeshSection(context=context)}
    two = run_online(
        recipe.model_copy(update={"device": recipe.device.model_copy(update=over_two)}), work, name
    )
    names = [
        "critic/rewards/mean",
        "actor/pg_loss",
        "actor/grad_norm",
        "actor/entropy",
        "critic/advantages/max",
    ]
    for name in names:
        # After the first update rounding may turn a sampled token; until then only sums are in another order.
        one_rank, two_ranks = (stable_metrics(run)[1][name] for run in (whole, two))
        assert two_ranks == pytest.approx(one_rank, abs=1e-5), name
    assert drawn(two) == drawn(whole)
