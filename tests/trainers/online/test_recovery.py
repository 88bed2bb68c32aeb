"""The loop over stand-ins: groups that are lost on their way to ranks, and weights before a validation."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins import StandInCollector, StandInGroup, stand_in_engines, weights

from isotrain.algorithms.kl import FixedKl
from isotrain.data.loader import Sampler
from isotrain.errors import WeightUpdateError
from isotrain.observe.console import LineConsole
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.online import GrpoSection, RolloutSection, ValidationSection
from isotrain.rollout.base import Sampling
from isotrain.trainers.build import TRAIN, VALIDATION
from isotrain.trainers.job import Job, Recorder, SaveSchedule
from isotrain.trainers.online.loop import OnlineProgress, OnlineTrainer
from isotrain.trainers.online.messages import RankPlan
from isotrain.trainers.online.policy_rank import PolicyRank
from isotrain.trainers.online.rollouts import BatchMaker
from isotrain.trainers.online.weight_sync import WeightSync
from isotrain.weights.update import Routes

N, ROWS = 2, 3


class Ranks:
    """Two ranks that cannot fetch what was put before the engine died, and score by a trajectory's number."""

    def __init__(self, lost: set[int]) -> None:
        self.lost, self.loads, self.called = lost, 0, list[str]()

    def __len__(self) -> int:
        return 2

    def within(self, timeout: float) -> Ranks:
        return self

    def call_each(self, method: Callable[..., Any], args: Sequence[RankPlan]) -> list[Any]:
        assert method == PolicyRank.load
        self.loads += 1
        self.plans = args
        return [
            [number for number, (handle, _) in enumerate(plan.groups) if handle.reference in self.lost]
            for plan in self.plans
        ]

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        self.called.append(method.__name__)
        if method == PolicyRank.reward_model_scores:
            own = [[i for mini in plan.mini_batches for micro in mini for i in micro] for plan in self.plans]
            return [{number: float(number) for number in numbers} for numbers in own]
        return [None, None]


def trainer(
    lost: set[int],
    group: StandInGroup,
    said: io.StringIO | None = None,
    reward_models: dict[str, float] | None = None,
) -> Any:
    """A loop of which only the parts that load and validate are there; 4 groups are put for each batch."""
    engines = stand_in_engines(group)
    collector = StandInCollector(engines)
    sections: dict[str, Any] = {
        "algorithm": GrpoSection(name="grpo", mini_batch_size=2),
        "rollout": RolloutSection(n=N, max_tokens=8, validation=ValidationSection(n=N)),
        "reward": SimpleNamespace(reward_models=reward_models or {}, failed_score=0.0),
        "data": SimpleNamespace(batch_size=4, tokens_per_micro_batch=64),
    }
    ranks: Any = Ranks(lost)
    nobody: Any = []
    files = Routes("file", ((0,),), (1, 0), ("", ""))
    parts: dict[str, Any] = dict.fromkeys(("batches", "schedule", "critic_schedule", "estimation"))
    recorder = Recorder(LineConsole(said or io.StringIO()))
    return OnlineTrainer(
        job=Job(RunDirectory("run"), recorder, 9, 9, SaveSchedule(0, 9)),
        ranks=ranks,
        engines=engines,
        weights=WeightSync(ranks, engines, nobody, [files], colocated=False),
        collector=collector,
        maker=BatchMaker(collector, Sampler(10, 4, seed=1), N, Sampling(8), attempts=0, greedy=False),
        progress=OnlineProgress(FixedKl(0.0)),
        share_prompts=False,
        context=1,
        devices=1,
        validation_rows=ROWS,
        record=None,
        colocated=False,
        **sections,
        **parts,
    )


def test_lost_groups_of_a_batch_are_generated_until_all_are_there() -> None:
    said = io.StringIO()
    # The second try of draw 1 has the handle 4, and is lost as well.
    loop = trainer({1, 4}, StandInGroup(), said)
    before = loop.maker.begin()(lambda: None)
    batch, plan = loop._deliver(before)
    assert [g.responses for g in batch.groups] == [g.responses for g in before.groups], (
        "the same draws in order"
    )
    assert [g.handle.reference for g in batch.groups] == [0, 5, 2, 3]
    assert loop.collector.asked[1:] == [(TRAIN, [1], N, 1.0)] * 2
    fetched = {handle.reference for rank in plan.ranks for handle, _ in rank.groups}
    assert loop.ranks.loads == 3 and fetched == {0, 5, 2, 3}
    assert said.getvalue().count("warning: 1 lost group(s) will be generated again") == 2
    assert batch.taken == before.taken == 4


def test_lost_groups_of_a_validation_are_generated_again() -> None:
    loop = trainer({0}, StandInGroup(), reward_models={"model": 1.0})
    metrics = loop.validate(1)
    assert loop.collector.asked == [(VALIDATION, [-1, -2, -3], N, 0.0), (VALIDATION, [-1], N, 0.0)]
    # Scores of the stand-in (0 and 1) and of the judge (0 to 5), each with its own response.
    assert metrics["val-core/data/reward/mean@2"] == pytest.approx(0.5 + 2.5)
    assert loop.ranks.loads == 2 and loop.ranks.called == ["reward_model_scores", "forget"]


def test_a_validation_does_not_begin_before_its_weights_are_verified() -> None:
    loop = trainer(set(), StandInGroup(hangs_at=1))
    loop.engines.timeout = 0.3
    loop.engines.send(weights(1))
    with pytest.raises(WeightUpdateError, match="weight update 1 did not end"):
        loop.validate(1)
    assert not loop.collector.asked


def test_what_a_validation_has_verified_is_told_with_the_next_weights() -> None:
    loop = trainer(set(), StandInGroup())
    sent = weights(1)
    loop.engines.send(sent._replace(logps=sent.logps + 0.25))
    loop.validate(1)
    assert loop.engines.settle() == pytest.approx(0.25)


@pytest.mark.parametrize(("step", "again"), [(3, ["wake", "update"]), (9, [])])
def test_colocated_engines_sleep_while_a_reward_model_scores(step: int, again: list[str]) -> None:
    """A device has room for one of them; what slept has no weights. After the last step nobody needs it."""
    group = StandInGroup()
    loop = trainer(set(), group, reward_models={"model": 1.0})
    loop.colocated = True
    loop.engines.send(weights(0))
    loop.engines.settle()
    loop.ranks.called = group.called = []
    loop.validate(step)
    device = ["sleep", "onload_reward_models", "reward_model_scores", "offload"]
    assert group.called == [*device, *again, "forget"]
