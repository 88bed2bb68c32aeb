"""Two runs side by side: what is compared, what is refused, what the published rules say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotrain.errors import DataError
from isotrain.tools.parity.compare.comparison import compare, environment_changes
from isotrain.tools.parity.compare.published import kind_of
from isotrain.tools.parity.run import RunLog, Series


def run(name: str = "a", steps: int = 10, shift: float = 0.0, **more: Any) -> RunLog:
    steps_S = np.arange(1, steps + 1)
    loss_S = 2.0 / steps_S + shift
    metrics = {
        "train/loss": Series(steps_S, loss_S),
        "critic/rewards/mean": Series(steps_S, 1 - loss_S / 4),
        "perf/throughput": Series(steps_S, np.where(steps_S <= 4, 50.0, 100.0) * (1 + shift)),
        "lr": Series(steps_S, np.full(steps, 1e-5)),
    }
    return RunLog(Path(name), "test", {**metrics, **more.pop("metrics", {})}, **more)


def test_losses_and_rewards_are_compared() -> None:
    found = compare(run(), run("b"))
    assert list(found.curves) == ["train/loss", "critic/rewards/mean"]
    assert {outcome.rule.split(":")[0] for outcome in found.rule_results} == {
        "verl",
        "OpenRLHF",
        "accuracy guide",
    }
    assert all(outcome.passed for outcome in found.rule_results)
    assert found.speed["first 4 steps"].ratio == found.speed["without the first 4 steps"].ratio == 1.0


def test_published_rules_mean_hundredths_of_the_unit() -> None:
    """0.019 is 1.9 of theirs whatever the loss is; of a loss of 2.0 it is 1 %, of one of 0.2 near 10 %."""
    found = compare(run(), run("b", shift=0.019))
    by_rule = {(one.rule, one.metric): one for one in found.rule_results}
    assert by_rule["verl: loss, mean absolute error", "train/loss"].value == pytest.approx(1.9)
    assert by_rule["verl: loss, mean absolute error", "train/loss"].passed
    relative = by_rule["accuracy guide: mean relative error", "train/loss"]
    assert not relative.passed and relative.value == pytest.approx(
        100 * np.mean(0.019 * np.arange(1, 11) / 2)
    )
    assert not compare(run(), run("b", shift=0.021)).rule_results[0].passed


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train/loss", "loss"),
        ("actor/pg_loss", "loss"),
        ("loss", "loss"),
        ("loss_mean", "loss"),
        ("critic/rewards/mean", "reward"),
        ("reward", "reward"),
        ("perf/throughput", None),
        ("timing_s/reward", None),
        ("actor/ppo_kl", None),
        ("actor/kl_loss", None),
        ("closs", None),
    ],
)
def test_tells_kinds_of_metrics(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind


def test_other_lengths_are_compared_where_both_have_steps() -> None:
    one = compare(run(), run("b", steps=8)).aligned["train/loss"]
    assert (len(one.steps_S), one.of_reference, one.of_candidate, one.whole) == (8, 10, 8, False)
    assert compare(run(), run("b")).aligned["train/loss"].whole


def test_numbers_that_are_none() -> None:
    bad = Series(np.arange(1, 11), np.array([1.0] * 8 + [np.nan, np.inf]))
    found = compare(run(), run("b", metrics={"train/loss": bad}))
    (one,) = found.not_numbers
    assert one.one_sided and one.words == "train/loss of the candidate is not a number from step 9 on"
    assert found.curves["train/loss"].steps == 8
    both = compare(run(metrics={"train/loss": bad}), run("b", metrics={"train/loss": bad})).not_numbers
    assert not both[0].one_sided and "in both runs, from step 9" in both[0].words
    with pytest.raises(DataError, match="what can be allowed is"):
        compare(run(), run("b"), allow=["nan"])


def test_finds_other_recipes_and_data() -> None:
    recipe = {"optimizer": {"lr": 1e-5}, "device": {"type": "cpu"}, "output": "a"}
    other = {"optimizer": {"lr": 2e-5}, "device": {"type": "npu"}, "output": "b"}
    found = compare(run(recipe=recipe, data={"train": "x"}), run("b", recipe=other, data={"train": "y"}))
    assert [one.name for one in found.differences] == ["recipe", "data"]
    assert found.differences[0].message == "the recipes differ: optimizer.lr: 1e-05 -> 2e-05"
    assert not compare(run(recipe=recipe), run("b", recipe=recipe | {"device": {"type": "npu"}})).differences
    allowed = compare(run(recipe=recipe, data={"train": "x"}), run("b", recipe=other), allow=["recipe"])
    assert not allowed.differences and [one.name for one in allowed.allowed] == ["recipe"]


def test_a_replay_in_another_place_has_no_differences() -> None:
    """Where responses come from is free; so are paths, but only where what is there has the same digest."""
    data, models = {"train": "x"}, {"model": "y"}
    recipe = {"model": {"path": "here"}, "data": {"train": "a.jsonl"}, "rollout": {"n": 4, "replay": None}}
    other = {"model": {"path": "there"}, "data": {"train": "b.jsonl"}, "rollout": {"n": 4, "replay": "here"}}
    one = run(recipe=recipe, data=data | models)
    assert not compare(one, run("b", recipe=other, data=data | models)).differences
    (found,) = compare(one, run("b", recipe=other, data=data)).differences
    assert found.message == "the recipes differ: model.path: here -> there"
    assert compare(one, run("b", recipe=recipe | {"rollout": {"n": 8}}, data=data)).differences


def test_what_differs_around_them() -> None:
    one = run(environment={"packages": {"torch": "2.10.0"}, "time": "now", "variables": {}})
    other = run("b", environment={"packages": {"torch": "2.13.0"}, "time": "then", "variables": {"A": "x"}})
    assert environment_changes(one, other) == [
        "packages.torch: 2.10.0 -> 2.13.0",
        "variables.A: (absent) -> x",
    ]


def test_refuses_runs_with_nothing_in_common() -> None:
    with pytest.raises(DataError, match="no loss or reward in common"):
        compare(RunLog(Path("a"), "test", {}), run("b"))
    late = run("b", metrics={"train/loss": Series(np.arange(11, 21), np.ones(10))})
    with pytest.raises(DataError, match="'train/loss' has no step in both runs"):
        compare(run(), late, ["train/loss"])
    with pytest.raises(DataError, match="a has no 'x'"):
        compare(run(), run("b"), ["x"])


def test_json_has_curves_and_rules() -> None:
    told = compare(run(), run("b", shift=0.1)).as_json()
    assert told["steps"]["train/loss"]["compared"] == 10 and told["curves"]["train/loss"]["signed_mean"] > 0
    assert {rule["passed"] for rule in told["published_rules"]} == {False, True}


def test_a_replay_has_no_throughput_of_its_own() -> None:
    """It did not sample: its speed beside that of a run which did says nothing."""
    recorded, replayed = ({"rollout": {"replay": path, "n": 8}} for path in (None, "runs/here"))
    assert compare(run(recipe=recorded), run("b", recipe=recorded)).speed
    assert not compare(run(recipe=recorded), run("b", recipe=replayed)).speed


def test_two_logs_with_other_configurations() -> None:
    """Settings of logs are compared field by field; files and models by their names."""
    settings: dict[str, Any] = {
        "model": {"path": "/cache/models--Qwen--Qwen2-7B/snapshots/f28"},
        "data": {"train": ["/a/gsm8k/train.parquet"], "batch_size": 8, "tokens_per_micro_batch": 1},
        "reward": {"gsm8k": {"method": "strict", "weight": 1.0, "format_score": 0.0, "more": "x" * 90}},
        "verl": {"algorithm.adv_estimator": "gpg"},
    }
    there = {
        **settings,
        "model": {"path": "/models/Qwen2-7B/"},
        "data": {"train": "/b/gsm8k/train.parquet", "batch_size": 8, "tokens_per_micro_batch": 2},
    }
    log = run(settings=settings)
    assert not compare(log, run("b", settings=there)).differences
    other = {**there, "data": {"train": "/b/math/train.parquet", "batch_size": 8}, "reward": None}
    (difference,) = compare(log, run("b", settings={**other, "verl": {}})).differences
    assert difference.name == "recipe" and difference.message.startswith(
        "the printed configurations differ: "
    )
    assert (
        'data.train: ["gsm8k/train.parquet"] -> ["math/train.parquet"]; reward: {"gsm8k"'
        in difference.message
    )
    assert '"more... -> null; verl.algorithm.adv_estimator: gpg -> (absent)' in difference.message
    assert not compare(log, run("b")).differences
    # A run of isotrain has the same fields.
    (difference,) = compare(run(recipe=settings), run("b", settings=other)).differences
    assert "math/train.parquet" in difference.message
