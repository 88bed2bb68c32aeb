"""The online loop: generate, score, estimate, update, send the weights out, validate, save.

R: trajectories of a step, E: its responses or episodes; only an episode can have several trajectories.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from isotrain.algorithms import mismatch as mismatches
from isotrain.algorithms.dapo import overlong_penalty
from isotrain.algorithms.kl import AdaptiveKl, FixedKl
from isotrain.cluster.failures import Overdue, WorkerDied
from isotrain.cluster.workers import WorkerGroup
from isotrain.engine.checkpoint.pending import wait_for_pending
from isotrain.engine.schedule import Schedule
from isotrain.errors import NonFiniteError, RewardError, WeightUpdateError
from isotrain.rollout.base import Sampling
from isotrain.trainers.online.messages import (
    Group,
    PromptRequest,
    RankRecord,
    RankScores,
    RankStep,
    RunState,
    StepPlan,
    TrajectoriesHandle,
    episode_numbers,
    last_sequences,
    plan_step,
)
from isotrain.trainers.online.metrics import (
    Failures,
    Numbers,
    Scored,
    Warnings,
    advantage_metrics,
    episode_penalties,
    step_metrics,
    total_scores,
    trajectory_marks,
    validation_metrics,
)
from isotrain.trainers.online.policy_rank import PolicyRank, StepReport
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.trainers.online.rollouts import AsyncBatches, Batch, Collector, Maker, SyncBatches
from isotrain.trainers.online.step import AdvantageSettings
from isotrain.trainers.online.timing import timed
from isotrain.trainers.online.weight_sync import Engines, WeightSync
from isotrain.trainers.preemption import Preempted, Preemption
from isotrain.trainers.recorder import Recorder
from isotrain.trainers.save_schedule import SaveSchedule
from isotrain.trainers.setup import VALIDATION

# Timeout of the current checkpoint when the run ends with an error: if a rank died, its part may never come.
WRITING_SECONDS, WRITING_SECONDS_AFTER_A_DEATH, WRITING_SECONDS_WHEN_OVERDUE = 300.0, 5.0, 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class LoopSettings:
    """The numbers of the loop itself."""

    steps: int
    last_step: int
    """Where this run ends: a probe of later steps ends before the schedule does."""
    validate_every: int
    validate_first: bool
    mini_batch_size: int
    """Prompts of one update."""
    budget: int
    share_prompts: bool
    """Whether the ranks compute a prompt once for all responses to it that they have."""
    context: int
    """Ranks that compute the same trajectories together."""
    devices: int
    estimation: AdvantageSettings
    several_updates: bool
    """Whether a step has more than one update, so that the old policy is not the one that is updated."""
    uses_reference: bool
    kl_in_reward: bool
    critic_warmup: int
    reward_models: Mapping[str, float]
    """Models on the ranks that give rewards, with their weights."""
    failed_score: float
    overlong: dict[str, Any] | None
    validation_rows: int
    validation_n: int
    validation_sampling: Sampling
    generates: bool
    """Whether there are engines; a replay has none, and so no validation."""
    colocated: bool
    """Whether ranks and engines use the same device memory one after the other."""
    checkpoints: Path
    record: Path | None
    max_skipped: int


@dataclass
class OnlineTrainer:
    settings: LoopSettings
    ranks: WorkerGroup[PolicyRank]
    engines: Engines
    weights: WeightSync
    collector: Collector
    maker: Maker
    batches: SyncBatches | AsyncBatches
    schedule: Schedule
    critic_schedule: Schedule | None
    kl: FixedKl | AdaptiveKl
    saves: SaveSchedule
    recorder: Recorder
    preemption: Preemption = field(default_factory=Preemption)
    skipped: int = 0
    first: bool = True
    """Whether no batch of this start was trained on yet."""
    waited: bool = False
    """Whether an error has waited for the checkpoint that was being written."""
    warnings: Warnings = field(default_factory=Warnings)
    validation_warnings: Warnings = field(default_factory=Warnings)
    timing: dict[str, float] = field(default_factory=dict)
    saving: dict[str, float] = field(default_factory=dict)
    peak_gb: float = 0.0
    """The largest of the ranks' device memory, as they told with the last step."""

    def train(self, done: int) -> None:
        """From the step after `done` to the last."""
        self.ranks.before_end = self._finish_writing
        try:
            self._train(done)
        except BaseException as error:
            self._finish_writing(error)
            raise
        finally:
            self.batches.close()

    def _finish_writing(self, error: BaseException) -> None:
        """An error does not cost the checkpoint that is being written; its writers use no collective."""
        if self.waited:
            return
        self.waited, died = True, isinstance(error, WorkerDied)
        seconds = WRITING_SECONDS_AFTER_A_DEATH if died else WRITING_SECONDS
        seconds = WRITING_SECONDS_WHEN_OVERDUE if self.preemption.overdue else seconds
        wait_for_pending(self.settings.checkpoints, seconds, self.recorder.console.message)

    def _train(self, done: int) -> None:
        if done == 0 and self.settings.validate_first and self.settings.validation_rows:
            self.recorder.write(0, self.validate(0))
        for step in range(done + 1, self.settings.last_step + 1):
            self.preemption.begin(step)
            self.timing, self.saving = self.saving, {}  # of the checkpoint after the step before
            with timed(self.timing, "step"):
                with timed(self.timing, "wait_for_batch"):
                    batch = self.batches.next()
                batch, plan = self._deliver(batch)
                values = self._learn(step, batch, plan)
                values |= self.send_weights(step)
                self.batches.weights_are_out()
            if self.settings.validation_rows and self._is_due(step, self.settings.validate_every):
                with timed(self.timing, "validate"):
                    values |= self.validate(step)
            values |= self._performance(batch, plan)
            self.recorder.write(step, values)
            preempted = self.preemption.requested
            if preempted or self.saves.is_due(step):
                self._save(step, batch.taken)
            if preempted and step < self.settings.last_step:
                self._finish()
                raise Preempted
        self.engines.settle()
        self._finish()

    def _finish(self) -> None:
        """Until the last checkpoint is on disk."""
        self.ranks.call(PolicyRank.finish)
        self.preemption.saved()

    def _tell_failures(self, step: int, failures: Failures) -> None:
        """A reward that fails costs one sample and not the run, but the user should know."""
        first, self.first = self.first, False
        if first and failures.share == 1.0 and self.settings.generates:
            raise RewardError(
                f"none of the first {failures.count} responses got a score; the first because of "
                f"{failures.first}; check the reward section and its answer_key"
            )
        if self.warnings.is_due(step, failures):
            self.recorder.console.message(f"warning: step {step}: {failures}")

    def _deliver(self, batch: Batch) -> tuple[Batch, StepPlan]:
        """Trajectories to the ranks that will learn from them."""
        with timed(self.timing, "deliver"):
            groups, plan = self._load(batch.groups, self.settings.mini_batch_size, self.maker.again)
        self.engines.post(RolloutWorker.release, batch.taken)
        if self.settings.colocated:
            with self._in_time("before training"):
                self.engines.on_all(RolloutWorker.sleep, self.engines.timeout)
                self.ranks.within(self.engines.timeout).call(PolicyRank.onload)
        return replace(batch, groups=groups), plan

    def _load(
        self,
        groups: list[Group],
        groups_per_mini_batch: int,
        again: Callable[[list[Group], Collection[TrajectoriesHandle]], list[Group]],
    ) -> tuple[list[Group], StepPlan]:
        """Trajectories to the ranks, straight from where the engines put them; `again` brings lost ones."""
        settings = self.settings
        while True:
            plan = plan_step(
                groups, groups_per_mini_batch, settings.budget, self._data_ranks, settings.share_prompts
            )
            lost = self.ranks.call_each(PolicyRank.load, self._to_all(plan.ranks))
            gone = {
                own.groups[i][0]
                for own, numbers in zip(self._to_all(plan.ranks), lost, strict=True)
                for i in numbers
            }
            if not gone:
                return groups, plan
            # Trajectories die with the process that put them: their draws are generated once more.
            self.recorder.console.message(f"warning: {len(gone)} lost group(s) will be generated again")
            groups = again(groups, gone)

    @property
    def _data_ranks(self) -> int:
        """Over how many ranks, or groups of ranks that have the same ones, trajectories are divided."""
        return len(self.ranks) // self.settings.context

    def _to_all(self, of_groups: Sequence[T]) -> list[T]:
        """What each group of ranks gets, for each of its ranks."""
        return [own for own in of_groups for _ in range(self.settings.context)]

    def _once(self, of_ranks: Sequence[T]) -> list[T]:
        """Results that the ranks of a group have in common, once for each group."""
        return list(of_ranks[:: self.settings.context])

    def _learn(self, step: int, batch: Batch, plan: StepPlan) -> dict[str, float]:
        """Everything between trajectories and new weights; returns the step's metrics."""
        settings, ranks = self.settings, self.ranks
        scores_E, failures, model_scores = self._scores(batch.groups)
        failures = failures.plus(batch.others)
        self._tell_failures(step, failures)
        warming = step <= settings.critic_warmup
        old_logps = settings.several_updates or settings.kl_in_reward or warming
        kl_E, mean_kl = np.zeros_like(scores_E), 0.0
        if settings.kl_in_reward:
            told = self._once(ranks.call(PolicyRank.prepare, old_logps))
            kl_E, mean_kl = episode_penalties(told, batch.groups)
        shaped_E = scores_E + self._length_shaping(batch)
        rewards_E = shaped_E - self.kl.coefficient * kl_E
        with timed(self.timing, "adv"):
            given = self._advantages(batch, plan, shaped_E, rewards_E)
        with timed(self.timing, "record") if settings.record is not None else nullcontext():
            records = self._records(step, batch, plan, given, rewards_E)
        critic_lr = None if self.critic_schedule is None else self.critic_schedule(step)
        reports = ranks.call_each(
            PolicyRank.learn,
            [
                RankStep(own, self.schedule(step), critic_lr, old_logps, not warming, record)
                for own, record in zip(self._to_all(given), records, strict=True)
            ],
        )
        self._hear(reports)
        reports = self._once(reports)
        values = step_metrics(batch.groups, scores_E, rewards_E, step - 1, failures)
        values |= model_scores | advantage_metrics([report.advantages for report in reports])
        values |= reports[0].metrics
        values |= mismatches.combine([report.mismatch for report in reports]).metrics()
        self._count_skipped(step, values)
        if settings.uses_reference:
            values["actor/kl_coef"] = self.kl.coefficient
        if settings.kl_in_reward:
            values["actor/reward_kl_penalty"] = mean_kl
            self.kl = self.kl.updated(mean_kl, len(scores_E))
        return values

    def _hear(self, reports: Sequence[StepReport]) -> None:
        """What the ranks tell besides metrics."""
        for name, seconds in reports[0].seconds.items():
            self.timing[name] = self.timing.get(name, 0.0) + seconds
        self.peak_gb = max(report.peak_gb for report in reports)
        self._tell_save_failure(report.save_failure for report in reports)

    def _tell_save_failure(self, failures: Iterable[str | None]) -> None:
        if failure := next(filter(None, failures), None):
            self.recorder.console.message(f"warning: {failure}; training continues without it")

    def _records(
        self, step: int, batch: Batch, plan: StepPlan, given: Sequence[RankScores], rewards_E: Numbers
    ) -> Sequence[RankRecord | None]:
        """What each rank writes down of its trajectories, if the run is recorded."""
        if self.settings.record is None:
            return [None] * len(self.ranks)
        where, others = str(self.settings.record), batch.others.as_counts()
        marks = plan.split(trajectory_marks(batch.groups, batch.greedy or {}, rewards_E))
        nothing = [None] * (self.settings.context - 1)
        return [
            record
            for own, scored in zip(marks, given, strict=True)
            for record in (RankRecord(where, step, own, scored.advantages, others), *nothing)
        ]

    def _scores(self, groups: Sequence[Group]) -> Scored:
        """Of the loaded responses, from all rewards. One that could not be scored stays at that."""
        settings, model_scores = self.settings, {}
        for name in settings.reward_models:
            with timed(self.timing, "reward_model"):
                told = self._once(self.ranks.call(PolicyRank.reward_model_scores, name))
            scores_R = np.empty(sum(map(len, told)))
            for part in told:
                scores_R[list(part)] = list(part.values())
            model_scores[name] = scores_R[last_sequences(groups)]
        return total_scores(groups, model_scores, settings.reward_models, settings.failed_score)

    def _length_shaping(self, batch: Batch) -> Numbers | float:
        if self.settings.overlong is None:
            return 0.0
        lengths_E = [n for group in batch.groups for n in group.responses.lengths]
        shaping_E: Numbers = overlong_penalty(lengths_E, **self.settings.overlong).double().numpy()
        return shaping_E

    def _advantages(
        self, batch: Batch, plan: StepPlan, scores_E: Numbers, rewards_E: Numbers
    ) -> list[RankScores]:
        """For each rank: scores, and advantages where a whole group is needed to tell them."""
        estimation, episode_R = self.settings.estimation, episode_numbers(batch.groups)
        advantages: Sequence[dict[int, float] | None] = [None] * self._data_ranks
        greedy: Sequence[dict[int, float] | None] = [None] * self._data_ranks
        if estimation.estimator.per == "trajectory":
            group_E = torch.tensor([number for number, g in enumerate(batch.groups) for _ in g.scores])
            advantages_E = estimation.estimator.function(
                torch.from_numpy(rewards_E), group_E, **estimation.options
            )
            advantages = plan.split(advantages_E[torch.from_numpy(episode_R)].tolist())
        if batch.greedy is not None:
            greedy = plan.split(
                [batch.greedy[g.responses.prompt_index] for g in batch.groups for _ in g.responses.written]
            )
        scores = plan.split(scores_E[episode_R].tolist())
        return [
            RankScores(scores[rank], advantages[rank], greedy[rank], self.kl.coefficient)
            for rank in range(self._data_ranks)
        ]

    def send_weights(self, version: int) -> dict[str, float]:
        """The policy's weights to all engines. On-policy, nothing goes on before they have them."""
        if not self.settings.generates:
            return {"rollout/version": float(version)}
        with timed(self.timing, "update_weights"), self._in_time(f"weight update {version}"):
            difference = self.weights.send(version, wait=isinstance(self.batches, SyncBatches))
        return {"rollout/version": float(version), "rollout/weight_check_diff": difference}

    def validate(self, step: int) -> dict[str, float]:
        settings = self.settings
        self.engines.settle()  # no metric of weights that turn out to be wrong may be written
        # Places before 0 are no draws of the run: training responses never share a seed with these.
        prompt_requests = [PromptRequest(-1 - row, row) for row in range(settings.validation_rows)]
        n, sampling = settings.validation_n, settings.validation_sampling
        groups, _ = self.collector.collect(VALIDATION, prompt_requests, n, sampling)
        if settings.reward_models:  # a reward model must be given the trajectories first

            def again(groups: list[Group], gone: Collection[TrajectoriesHandle]) -> list[Group]:
                return self.collector.again(VALIDATION, groups, gone, n, sampling)

            groups, _ = self._load(groups, len(groups), again)
        with self._device_for_reward_models(last=step == settings.steps):
            scores_E, failures, _ = self._scores(groups)
        if settings.reward_models:
            self.ranks.call(PolicyRank.forget)
        self.engines.post(RolloutWorker.release, 0)
        if self.validation_warnings.is_due(step, failures):
            self.recorder.console.message(f"warning: validation after step {step}: {failures}")
        return validation_metrics(groups, scores_E, failures)

    @contextmanager
    def _device_for_reward_models(self, last: bool) -> Iterator[None]:
        """Colocated engines sleep meanwhile; they lose their weights by it, and get them again unless it is
        the `last` time."""
        if not (self.settings.colocated and self.settings.reward_models):
            yield
            return
        limit = self.engines.timeout
        with self._in_time("validation"):
            self.engines.on_all(RolloutWorker.sleep, limit)
            self.ranks.within(limit).call(PolicyRank.onload_reward_models)
        yield
        with self._in_time("after validation"):
            self.ranks.within(limit).call(PolicyRank.offload)
            if not last:
                self.weights.send_again()

    def _performance(self, batch: Batch, plan: StepPlan) -> dict[str, float]:
        seconds = self.timing["step"]
        return {
            **{f"timing_s/{name}": value for name, value in self.timing.items()},
            "timing_s/gen": batch.seconds.generating,
            "timing_s/reward": batch.seconds.scoring,
            "rollout/resampled": float(batch.resampled),
            "perf/total_num_tokens": float(plan.tokens),
            "perf/time_per_step": seconds,
            "perf/throughput": plan.tokens / (seconds * self.settings.devices),
            "perf/max_memory_allocated_gb": self.peak_gb,
        }

    def _save(self, step: int, taken: int) -> None:
        started = time.perf_counter()
        self.recorder.sync()
        # Colocated, the ranks' state is in host memory since the weights were sent: it is saved from there.
        state = RunState(taken, self.kl.coefficient, self.skipped)
        self._tell_save_failure(self.ranks.call(PolicyRank.save, step, state))
        seconds = time.perf_counter() - started
        self.saving = {"save_checkpoint": seconds}
        self.saves.saved(seconds)

    def _count_skipped(self, step: int, values: dict[str, float]) -> None:
        skipped = int(values.pop("actor/skipped", 0.0) + values.pop("critic/skipped", 0.0))
        if not skipped:
            return
        self.skipped += skipped
        what = f"step {step}: {skipped} update(s) with a loss or gradient that is not finite"
        if self.skipped > self.settings.max_skipped:
            raise NonFiniteError(
                f"{what}; lower optimizer.lr, check this step's responses (rollout.record=true), "
                "or set trainer.non_finite=skip and trainer.max_skipped_steps"
            )
        self.recorder.console.message(f"warning: {what}, skipped")

    def _is_due(self, step: int, every: int) -> bool:
        return step == self.settings.steps or (every > 0 and step % every == 0)

    @contextmanager
    def _in_time(self, what: str) -> Iterator[None]:
        """A late worker, which the error names, is one that did not get the weights."""
        try:
            yield
        except Overdue as error:
            raise WeightUpdateError(f"{what}: {error} (rollout.update_timeout)") from error
