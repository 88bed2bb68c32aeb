"""The two answers about a pair: which evidence they take, which metric decides, how they are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from known_curves import falling, noisy, run_of

from isotrain.errors import DataError
from isotrain.tools.parity.compare.comparison import compare
from isotrain.tools.parity.compare.outcome import OtherRuns, margins_of, outcome_of, pairing_of
from isotrain.tools.parity.protocol import Companions, verdict_on
from isotrain.tools.parity.run import RunLog, Series
from isotrain.tools.parity.verdict import Verdict, judge

STEPS = 200


def sampled(seed: int, shift: float = 0.0, size: float = 0.02) -> RunLog:
    """A free-running run: a reward that rises, a policy loss around 0."""
    draw = np.random.default_rng(seed)
    steps_S = np.arange(1, STEPS + 1)
    reward_S = 0.2 + 0.6 * (1 - np.exp(-steps_S / 60)) + size * draw.normal(size=STEPS) + shift
    return RunLog(
        Path(f"run-{seed}"),
        "test",
        {
            "critic/rewards/mean": Series(steps_S, reward_S),
            "actor/pg_loss": Series(steps_S, 0.2 * draw.normal(size=STEPS)),
        },
    )


def written(path: Path, run: RunLog) -> Path:
    with path.open("w") as file:
        for index in range(STEPS):
            row = {name: series.values_S[index] for name, series in run.metrics.items()}
            file.write(json.dumps({"step": index + 1, **row}) + "\n")
    return path


def verdict(tmp_path: Path, a: RunLog, b: RunLog, **options: object) -> Verdict:
    paths = [written(tmp_path / name, run) for name, run in (("a.jsonl", a), ("b.jsonl", b))]
    return verdict_on(*paths, **options)  # type: ignore[arg-type]


def test_a_reward_that_is_lower_throughout_is_different(tmp_path: Path) -> None:
    found = verdict(tmp_path, sampled(1), sampled(2, -0.107))
    assert (found.outcome.verdict, found.computation.verdict) == ("different", "inconclusive")
    first = found.words.splitlines()[1]
    assert "critic/rewards/mean is 0.1" in first and "lower" in first and "margin of 0.04" in first
    assert "all 200 steps" in first and found.exit_code == 1 and found.deciding("computation").exit_code == 3


def test_an_honest_rerun_is_equivalent_and_says_what_is_not_known(tmp_path: Path) -> None:
    found = verdict(tmp_path, sampled(1), sampled(2))
    assert found.outcome.pairing == "free-running" and found.outcome.verdict == "equivalent"
    assert "run-to-run spread is unknown from one run a side" in found.words
    assert "parity record" in found.words and found.exit_code == 0


def test_supervised_logs_on_other_data_are_another_computation(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    a, b = (
        RunLog(Path("x"), "test", {"loss": Series(np.arange(1, 201), 2 + 0.1 * draw.normal(size=200))})
        for _ in range(2)
    )
    found = verdict(tmp_path, a, b)
    assert found.outcome.pairing == "paired" and found.computation.verdict == "different"
    assert "other data" in found.words


def test_the_same_rewards_step_by_step_are_paired() -> None:
    one = sampled(1)
    assert pairing_of(one, one) == "paired" and pairing_of(one, one, free=True) == "free-running"
    assert pairing_of(one, sampled(2)) == "free-running"


def test_recipes_say_whether_a_run_samples() -> None:
    recipes = {
        "sft": {"rollout": None},
        "grpo": {"rollout": {"replay": None}},
        "replay": {"rollout": {"replay": "x"}},
    }
    runs = {
        name: RunLog(Path(name), "test", sampled(seed).metrics, recipe=recipe)
        for seed, (name, recipe) in enumerate(recipes.items())
    }
    assert pairing_of(
        runs["grpo"], runs["grpo"].__class__(Path("b"), "test", sampled(9).metrics, recipes["grpo"])
    ) == ("free-running")
    assert pairing_of(runs["sft"], runs["sft"]) == pairing_of(runs["grpo"], runs["replay"]) == "paired"


def test_rewards_decide_where_responses_are_sampled() -> None:
    """The policy loss is noise of 0.2, which nobody can show to be within 0.02."""
    comparison = compare(sampled(1), sampled(2))
    found = outcome_of(comparison, "free-running")
    by_name = {one.metric: one.verdict for one in found.effects}
    assert by_name["actor/pg_loss"] == "inconclusive" and found.verdict == "equivalent"
    assert found.effects[0].metric == "critic/rewards/mean"


def test_what_is_not_a_number_on_one_side_is_different(tmp_path: Path) -> None:
    broken = sampled(2)
    broken.metrics["critic/rewards/mean"].values_S[120:] = np.nan
    found = verdict(tmp_path, sampled(1), broken)
    assert (found.outcome.verdict, found.computation.verdict) == ("different", "different")
    assert "of the candidate is not a number from step 121 on" in found.words


def test_both_sides_without_numbers_are_inconclusive(tmp_path: Path) -> None:
    runs = [sampled(1), sampled(2)]
    for run in runs:
        run.metrics["critic/rewards/mean"].values_S[120:] = np.nan
    found = verdict(tmp_path, *runs)
    assert (found.outcome.verdict, found.computation.verdict) == ("inconclusive", "inconclusive")


def test_reruns_bring_the_spread_between_runs_in(tmp_path: Path) -> None:
    """Runs of the reference that differ by 0.05 among themselves: 0.08 is nothing then."""
    shifts = (0.05, -0.05, 0.04, -0.03)
    reruns = [written(tmp_path / f"r{n}.jsonl", sampled(10 + n, s)) for n, s in enumerate(shifts)]
    alone = verdict(tmp_path, sampled(1), sampled(2, -0.08))
    assert alone.outcome.verdict == "different"
    among = verdict(tmp_path, sampled(1), sampled(2, -0.08), companions=Companions(reruns))
    assert among.outcome.verdict == "inconclusive"
    assert among.outcome.effects[0].evidence == "5 runs of the reference, one of the candidate"


def test_pairs_of_seeds_can_prove_equivalence(tmp_path: Path) -> None:
    pairs = [
        tuple(written(tmp_path / f"{side}{seed}.jsonl", sampled(seed + 50 * side)) for side in (0, 1))
        for seed in range(20, 26)
    ]
    found = verdict(tmp_path, sampled(1), sampled(2), companions=Companions((), pairs))
    assert found.outcome.verdict == "equivalent"
    assert found.outcome.effects[0].evidence == "7 runs of the reference, 7 of the candidate"


def test_scores_are_compared_over_seeds() -> None:
    def run(score: float) -> RunLog:
        one = sampled(int(1000 * score))
        return RunLog(
            one.path,
            "test",
            {**one.metrics, "val-core/x/reward/mean@1": Series(np.array([9]), np.array([score]))},
        )

    good, bad = [0.50, 0.52, 0.48, 0.51], [0.30, 0.32, 0.28, 0.31]
    pairs = [(run(a), run(b)) for a, b in zip(good, bad, strict=True)]
    found = outcome_of(compare(*pairs[0]), "free-running", OtherRuns((), pairs[1:]))
    assert next(one for one in found.effects if one.kind == "score").verdict == "different"


def test_the_cut_is_in_the_first_sentence(tmp_path: Path) -> None:
    a, b = (tmp_path / name for name in ("a.jsonl", "b.jsonl"))
    for path, steps in ((a, 80), (b, 60)):
        curve = falling()
        path.write_text("".join(json.dumps({"step": s + 1, "loss": curve[s]}) + "\n" for s in range(steps)))
    words = verdict_on(a, b).words.splitlines()[1]
    assert "over 60 steps: the reference has 80, the candidate 60" in words


def cut(run: RunLog, steps: int) -> RunLog:
    series = {name: Series(one.steps_S[:steps], one.values_S[:steps]) for name, one in run.metrics.items()}
    return replace(run, metrics=series)


@pytest.mark.parametrize("role", ["candidate", "reference"])
def test_a_run_that_ended_early_is_at_most_inconclusive(role: str) -> None:
    whole, ended = sampled(1, size=0.005), cut(sampled(2, size=0.005), 35)
    pair = (whole, ended) if role == "candidate" else (ended, whole)
    found = judge(compare(*pair), outcome_of(compare(*pair), "free-running"), [])
    assert found.outcome.effects[0].verdict == "equivalent" and found.outcome.verdict == "inconclusive"
    assert found.exit_code == 3
    words = found.words.splitlines()[1]
    assert f"The {role} ended at step 35 of 200." in words and "within the margin" in words
    intended = compare(*pair, allow=["steps"])
    assert outcome_of(intended, "free-running").verdict == "equivalent"


def test_runs_that_ended_before_their_plan_are_at_most_inconclusive() -> None:
    pair = [replace(cut(sampled(seed, size=0.005), 150), planned_steps=200) for seed in (1, 2)]
    found = outcome_of(compare(*pair), "free-running")
    assert found.verdict == "inconclusive" and len(found.objections) == 2


def test_a_worse_run_that_ended_early_is_different() -> None:
    pair = sampled(1), cut(sampled(2, -0.2), 100)
    found = judge(compare(*pair), outcome_of(compare(*pair), "free-running"), [])
    assert found.exit_code == 1 and "ended at step 100 of 200" in found.words


@pytest.mark.parametrize(
    ("every", "last", "early"), [(1, 199, False), (1, 198, True), (10, 190, False), (10, 180, True)]
)
def test_a_log_may_lack_what_came_after_its_last_record(every: int, last: int, early: bool) -> None:
    whole = sampled(1)
    recorded = slice(every - 1, last, every)
    series = {
        name: Series(one.steps_S[recorded], one.values_S[recorded]) for name, one in whole.metrics.items()
    }
    assert bool(compare(whole, replace(whole, metrics=series)).objections) == early


def test_reads_margins_and_refuses_wrong_ones() -> None:
    metrics = ["train/loss", "critic/rewards/mean"]
    assert margins_of(["reward=0.1"], metrics) == {"critic/rewards/mean": 0.1}
    assert margins_of(["train/loss=1e-3"], metrics) == {"train/loss": 1e-3}
    for wrong in ("reward", "reward=", "reward=x", "reward=-1", "reward=nan", "=1"):
        with pytest.raises(DataError, match="--margin"):
            margins_of([wrong], metrics)
    with pytest.raises(DataError, match="no such metric is compared"):
        margins_of(["speed=1"], metrics)


def test_a_margin_decides() -> None:
    reference = falling()
    comparison = compare(run_of(loss=reference), run_of(loss=noisy(reference, 1e-3, 1) + 0.05))
    assert outcome_of(comparison, "paired").verdict == "different"
    assert outcome_of(comparison, "paired", margins={"train/loss": 0.1}).verdict == "equivalent"


def test_json_has_both_answers(tmp_path: Path) -> None:
    told = verdict(tmp_path, sampled(1), sampled(2, -0.107)).as_json()
    effect = told["outcome"]["effects"]["critic/rewards/mean"]
    assert told["outcome"]["verdict"] == "different" and effect["margin"] == 0.04
    assert effect["interval"]["low"] < effect["difference"] < effect["interval"]["high"] < 0
    assert effect["unit"] and told["computation"]["verdict"] == "inconclusive"
    assert [level["name"] for level in told["computation"]["levels"]] == ["P0", "P1", "P2", "P3"]
