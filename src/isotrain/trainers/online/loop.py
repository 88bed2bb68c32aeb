"""The online loop: generate, score, estimate, update, send the weights out, validate, save.

R: trajectories of a step, E: its responses or episodes; only an episode can have several trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from isotrain.algorithms import mismatch as mismatches
from isotrain.algorithms.kl import AdaptiveKl, FixedKl
from isotrain.algorithms.rewards import overlong_penalty
from isotrain.cluster.failures import Overdue, WorkerDied
from isotrain.cluster.replaceable import Died, WorkerTask
from isotrain.cluster.workers import WorkerCall, WorkerGroup
from isotrain.engine.checkpoint.layout import wait_for_pending
from isotrain.engine.optimizer import Schedule
from isotrain.errors import RewardError, WeightUpdateError
from isotrain.observe.metrics import read_metrics
from isotrain.observe.mismatch_watch import METRIC as MISMATCH
from isotrain.observe.mismatch_watch import MismatchWatch
from isotrain.observe.spans import write_spans
from isotrain.recipe.data import DataSection
from isotrain.recipe.online import OnlineSection, PpoSection, RewardSection, RolloutSection
from isotrain.rollout.validation import validation_index, validation_sampling
from isotrain.trainers.build import VALIDATION
from isotrain.trainers.job import NARROW_HINT, Job
from isotrain.trainers.online.engines import Engines
from isotrain.trainers.online.messages import (
    Group,
    PromptRequest,
    RankRecord,
    RankScores,
    RankStep,
    StepPlan,
    TrajectoriesHandle,
    episode_numbers,
    last_sequences,
    plan_step,
)
from isotrain.trainers.online.metrics import (
    EqualScores,
    Failures,
    Numbers,
    TotalScores,
    Warnings,
    advantage_metrics,
    episode_penalties,
    step_metrics,
    timed,
    total_scores,
    trajectory_marks,
    validation_metrics,
)
from isotrain.trainers.online.policy_rank import PolicyRank, StepReport
from isotrain.trainers.online.rollout_worker import RolloutWorker
from isotrain.trainers.online.rollouts import AsyncBatches, Batch, Collector, Maker, SyncBatches
from isotrain.trainers.online.step import AdvantageSettings
from isotrain.trainers.online.weight_sync import WeightSync

# Timeout of the current checkpoint when the run ends with an error: if a rank died, its part may never come.
WRITING_SECONDS, WRITING_SECONDS_AFTER_A_DEATH, WRITING_SECONDS_WHEN_OVERDUE = 300.0, 5.0, 1.0

T = TypeVar("T")


@dataclass
class OnlineProgress:
    """How far the loop is: what a checkpoint keeps of it, then what only this start needs."""

    kl: FixedKl | AdaptiveKl
    taken: int = 0
    """Prompts drawn by the steps that were trained."""
    skipped: int = 0
    """Updates without effect, because a number was not finite."""
    has_trained: bool = False
    """Whether a batch of this start was trained on."""
    has_waited: bool = False
    """Whether an error has waited for the checkpoint that was being written."""
    warnings: Warnings = field(default_factory=Warnings)
    validation_warnings: Warnings = field(default_factory=Warnings)
    equal_scores: EqualScores = field(default_factory=EqualScores)
    mismatch: MismatchWatch = field(default_factory=MismatchWatch)
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the current step."""
    save_timing: dict[str, float] = field(default_factory=dict)
    """Seconds of the last checkpoint, which the next step reports."""
    peak_gb: float = 0.0
    """The largest device memory of a rank, as of the last step."""

    def saved(self) -> dict[str, float]:
        return {"taken": self.taken, "kl_coefficient": self.kl.coefficient, "skipped": self.skipped}


@dataclass
class OnlineTrainer:
    job: Job
    algorithm: OnlineSection
    rollout: RolloutSection
    reward: RewardSection
    data: DataSection
    estimation: AdvantageSettings
    ranks: WorkerGroup[PolicyRank]
    engines: Engines
    weights: WeightSync
    collector: Collector
    maker: Maker
    batches: SyncBatches | AsyncBatches
    schedule: Schedule
    critic_schedule: Schedule | None
    progress: OnlineProgress
    share_prompts: bool
    """Whether the ranks compute a prompt once for all responses to it that they have."""
    context: int
    """Ranks that compute the same trajectories together."""
    devices: int
    """Number of devices, which throughput is divided by."""
    validation_rows: int
    record: Path | None
    """Where the ranks write their trajectories, if the run is recorded."""
    colocated: bool
    """Whether ranks and engines use the same device memory one after the other."""

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
        if self.progress.has_waited:
            return
        self.progress.has_waited, died = True, isinstance(error, WorkerDied)
        seconds = WRITING_SECONDS_AFTER_A_DEATH if died else WRITING_SECONDS
        seconds = WRITING_SECONDS_WHEN_OVERDUE if self.job.preemption.overdue else seconds
        wait_for_pending(self.job.run.checkpoints, seconds, self.job.recorder.console.message)

    def _watch_mismatch(self, step: int, values: Mapping[str, float]) -> None:
        """Log-probs of stale weights differ by more than rounding: only on-policy steps tell."""
        if not self.rollout.generates or self.rollout.staleness:
            return
        if warning := self.progress.mismatch.observe(step, values.get(MISMATCH, math.nan)):
            self.job.recorder.console.message(f"warning: {warning}")

    def _train(self, done: int) -> None:
        self.progress.mismatch = MismatchWatch(str(self.job.run.path))
        for row in read_metrics(self.job.run.metrics) if self.job.run.metrics.is_file() and done else ():
            self.progress.mismatch.observe(int(row["step"]), row.get(MISMATCH, math.nan))
        for step in self.job.steps_after(done, self):
            timing = self.progress.timing = self.progress.save_timing
            self.progress.save_timing = {}
            with timed(timing, "step"):
                with self._timed("wait_for_batch"):
                    batch = self.batches.next()
                batch, plan = self._deliver(batch)
                values = self._learn(step, batch, plan)
                values |= self.send_weights(step)
                self.batches.weights_published()
            self.progress.taken = batch.taken
            if self.job.validates_after(step):
                with self._timed("validate"):
                    values |= self.validate(step)
            values |= self._performance(batch, plan)
            if seconds := self.job.end_step(step, values, self):
                self.progress.save_timing = {"save_checkpoint": seconds}
        self.engines.settle()
        self.job.finish(self)

    def begin_profile(self, step: int) -> None:
        self.ranks.call(PolicyRank.begin_profile)
        for task in self._beside_engines(RolloutWorker.begin_profile):
            self.engines.result(task)
        self.job.spans.begin()

    def end_profile(self, step: int) -> None:
        spans = self.job.spans.take()
        of_ranks = self.ranks.call(PolicyRank.end_profile, step)
        for rank in of_ranks:
            spans += rank.spans
        for task in self._beside_engines(RolloutWorker.end_profile):
            reply = self.engines.result(task)
            spans += [] if isinstance(reply, Died) else reply
        problems = [write_spans(self.job.run, step, "controller", spans), *(r.problem for r in of_ranks)]
        for problem in filter(None, problems):
            self.job.recorder.console.message(f"warning: {problem}")

    def _beside_engines(self, method: Callable[[RolloutWorker], T]) -> list[WorkerTask[WorkerCall[T]]]:
        """Engines may be generating, and are not waited for."""
        return [self.engines.submit_beside(index, method) for index in range(len(self.engines))]

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        with timed(self.progress.timing, name), self.job.spans.span(name):
            yield

    def save(self, step: int) -> None:
        # Colocated, the ranks' state is in host memory since the weights were sent: it is saved from there.
        failures = self.ranks.call(PolicyRank.save, step, self.progress.saved())
        self.job.warn_save_failure(next(filter(None, failures), None))

    def finish(self) -> None:
        self.ranks.call(PolicyRank.finish)

    def _tell_failures(self, step: int, failures: Failures) -> None:
        """A reward that fails costs one sample and not the run, but the user should know."""
        is_first, self.progress.has_trained = not self.progress.has_trained, True
        if is_first and failures.share == 1.0 and self.rollout.generates:
            raise RewardError(
                f"none of the first {failures.count} responses got a score; the first because of "
                f"{failures.first}; check the reward section and its answer_key"
            )
        if self.progress.warnings.is_due(step, failures):
            self.job.recorder.console.message(f"warning: step {step}: {failures}")

    def _warn_equal_scores(self, step: int, batch: Batch, scores_E: Numbers) -> None:
        if self.algorithm.distillation.path is not None:  # a teacher says what the scores do not
            return
        if (
            batch.greedy is not None
        ):  # the baseline is another response: equal scores can be above or below it
            return
        within = self.estimation.estimator.per == "trajectory"
        problem = self.progress.equal_scores.problem(batch.groups, scores_E, compares_within_groups=within)
        if problem:
            self.job.recorder.console.message(f"warning: step {step}: {problem}")

    def _deliver(self, batch: Batch) -> tuple[Batch, StepPlan]:
        """Trajectories to the ranks that will learn from them."""
        mini_batch_size = self.algorithm.prompts_per_update(self.data.batch_size)
        with self._timed("deliver"):
            groups, plan = self._load(batch.groups, mini_batch_size, self.maker.again)
        self.engines.post(RolloutWorker.release, batch.taken)
        if self.colocated:
            with self.job.spans.span("switch"), self._in_time("before training"):
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
        budget = self.data.tokens_per_micro_batch
        while True:
            plan = plan_step(groups, groups_per_mini_batch, budget, self._data_ranks, self.share_prompts)
            rank_plans = self._broadcast(plan.ranks)
            lost = self.ranks.call_each(PolicyRank.load, rank_plans)
            gone = {
                rank_plan.groups[i][0]
                for rank_plan, numbers in zip(rank_plans, lost, strict=True)
                for i in numbers
            }
            if not gone:
                return groups, plan
            # Trajectories die with the process that put them: their draws are generated once more.
            self.job.recorder.console.message(f"warning: {len(gone)} lost group(s) will be generated again")
            groups = again(groups, gone)

    @property
    def _data_ranks(self) -> int:
        """Over how many ranks, or groups of ranks that have the same ones, trajectories are divided."""
        return len(self.ranks) // self.context

    def _broadcast(self, of_groups: Sequence[T]) -> list[T]:
        """For each rank, the value of its group of ranks."""
        return [value for value in of_groups for _ in range(self.context)]

    def _one_per_group(self, of_ranks: Sequence[T]) -> list[T]:
        """Results that the ranks of a group have in common, once for each group."""
        return list(of_ranks[:: self.context])

    def _learn(self, step: int, batch: Batch, plan: StepPlan) -> dict[str, float]:
        """Everything between trajectories and new weights; returns the step's metrics."""
        algorithm, ranks = self.algorithm, self.ranks
        scores_E, failures, model_scores = self._scores(batch.groups)
        failures = failures.plus(batch.others)
        self._tell_failures(step, failures)
        warming = isinstance(algorithm, PpoSection) and step <= algorithm.critic.warmup_steps
        kl_in_reward = algorithm.kl.place == "reward"
        # Where a step has more than one update, the old policy is not the one that is updated.
        several = algorithm.updates_per_step(self.data.batch_size) > 1
        old_logps = (several and not algorithm.rollout_correction.bypass_mode) or kl_in_reward or warming
        kl_E, mean_kl = np.zeros_like(scores_E), 0.0
        if kl_in_reward:
            with self.job.spans.span("learn"):
                penalties = self._one_per_group(ranks.call(PolicyRank.prepare, old_logps))
            kl_E, mean_kl = episode_penalties(penalties, batch.groups)
        shaped_E = scores_E + self._length_shaping(batch)
        self._warn_equal_scores(step, batch, shaped_E)
        rewards_E = shaped_E - self.progress.kl.coefficient * kl_E
        with self._timed("adv"):
            given = self._advantages(batch, plan, shaped_E, rewards_E)
        with self._timed("record") if self.record is not None else nullcontext():
            records = self._records(step, batch, plan, given, rewards_E)
        critic_lr = None if self.critic_schedule is None else self.critic_schedule(step)
        orders = [
            RankStep(scores, self.schedule(step), critic_lr, old_logps, not warming, record)
            for scores, record in zip(self._broadcast(given), records, strict=True)
        ]
        with self.job.spans.span("learn"):
            reports = ranks.call_each(PolicyRank.learn, orders)
        self._collect_reports(reports)
        reports = self._one_per_group(reports)
        values = step_metrics(batch.groups, scores_E, rewards_E, step - 1, failures)
        values |= model_scores | advantage_metrics([report.advantages for report in reports])
        values |= reports[0].metrics
        values |= mismatches.combine([report.mismatch for report in reports]).metrics()
        self._watch_mismatch(step, values)
        self._count_skipped(step, values)
        if algorithm.kl.place != "off":
            values["actor/kl_coef"] = self.progress.kl.coefficient
        if kl_in_reward:
            values["actor/reward_kl_penalty"] = mean_kl
            self.progress.kl = self.progress.kl.updated(mean_kl, len(scores_E))
        return values

    def _collect_reports(self, reports: Sequence[StepReport]) -> None:
        """The parts of the ranks' reports that are no metrics of the update."""
        progress = self.progress
        for name, seconds in reports[0].seconds.items():
            progress.timing[name] = progress.timing.get(name, 0.0) + seconds
        progress.peak_gb = max(report.peak_gb for report in reports)
        self.job.warn_save_failure(next(filter(None, (report.save_failure for report in reports)), None))

    def _records(
        self, step: int, batch: Batch, plan: StepPlan, given: Sequence[RankScores], rewards_E: Numbers
    ) -> Sequence[RankRecord | None]:
        """The marks of each rank's trajectories for its recording, if the run is recorded."""
        if self.record is None:
            return [None] * len(self.ranks)
        where, others = str(self.record), batch.others.as_counts()
        marks = plan.split(trajectory_marks(batch.groups, batch.greedy or {}, rewards_E))
        nothing = [None] * (self.context - 1)
        return [
            record
            for rank_marks, scores in zip(marks, given, strict=True)
            for record in (RankRecord(where, step, rank_marks, scores.advantages, others), *nothing)
        ]

    def _scores(self, groups: Sequence[Group]) -> TotalScores:
        """Scores of the loaded responses from all rewards. One that could not be scored stays at that."""
        model_scores = {}
        for name in self.reward.reward_models:
            with self._timed("reward_model"):
                parts = self._one_per_group(self.ranks.call(PolicyRank.reward_model_scores, name))
            scores_R = np.empty(sum(map(len, parts)))
            for part in parts:
                scores_R[list(part)] = list(part.values())
            model_scores[name] = scores_R[last_sequences(groups)]
        return total_scores(groups, model_scores, self.reward.reward_models, self.reward.failed_score)

    def _length_shaping(self, batch: Batch) -> Numbers | float:
        overlong = self.algorithm.overlong
        if not overlong.buffer:
            return 0.0
        lengths_E = [n for group in batch.groups for n in group.responses.lengths]
        penalty_E = overlong_penalty(
            lengths_E, max_length=self.rollout.max_tokens, buffer=overlong.buffer, factor=overlong.factor
        )
        shaping_E: Numbers = penalty_E.double().numpy()
        return shaping_E

    def _advantages(
        self, batch: Batch, plan: StepPlan, scores_E: Numbers, rewards_E: Numbers
    ) -> list[RankScores]:
        """For each rank: scores, and advantages where a whole group is needed to tell them."""
        estimation, episode_R = self.estimation, episode_numbers(batch.groups)
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
            RankScores(scores[rank], advantages[rank], greedy[rank], self.progress.kl.coefficient)
            for rank in range(self._data_ranks)
        ]

    def send_weights(self, version: int) -> dict[str, float]:
        """The policy's weights to all engines. On-policy, nothing goes on before they have them."""
        if not self.rollout.generates:
            return {"rollout/version": float(version)}
        with self._timed("update_weights"), self._in_time(f"weight update {version}"):
            difference = self.weights.send(version, wait=isinstance(self.batches, SyncBatches))
        return {"rollout/version": float(version), "rollout/weight_check_diff": difference}

    def validate(self, step: int) -> dict[str, float]:
        self.engines.settle()  # no metric of weights that turn out to be wrong may be written
        prompt_requests = [PromptRequest(validation_index(row), row) for row in range(self.validation_rows)]
        n, sampling = self.rollout.validation.n, validation_sampling(self.rollout)
        groups, _ = self.collector.collect(VALIDATION, prompt_requests, n, sampling)
        if self.reward.reward_models:  # a reward model must be given the trajectories first

            def again(groups: list[Group], gone: Collection[TrajectoriesHandle]) -> list[Group]:
                return self.collector.again(VALIDATION, groups, gone, n, sampling)

            groups, _ = self._load(groups, len(groups), again)
        with self._device_for_reward_models(last=step == self.job.steps):
            scores_E, failures, _ = self._scores(groups)
        if self.reward.reward_models:
            self.ranks.call(PolicyRank.forget)
        self.engines.post(RolloutWorker.release, 0)
        if self.progress.validation_warnings.is_due(step, failures):
            self.job.recorder.console.message(f"warning: validation after step {step}: {failures}")
        return validation_metrics(groups, scores_E, failures)

    @contextmanager
    def _device_for_reward_models(self, last: bool) -> Iterator[None]:
        """Colocated engines sleep meanwhile; they lose their weights by it, and get them again unless it is
        the `last` time."""
        if not (self.colocated and self.reward.reward_models):
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
        timing = self.progress.timing
        seconds = timing["step"]
        return {
            **{f"timing_s/{name}": value for name, value in timing.items()},
            "timing_s/gen": batch.seconds.generating,
            "timing_s/reward": batch.seconds.scoring,
            "rollout/resampled": float(batch.resampled),
            "perf/total_num_tokens": float(plan.tokens),
            "perf/time_per_step": seconds,
            "perf/throughput": plan.tokens / (seconds * self.devices),
            "perf/max_memory_allocated_gb": self.progress.peak_gb,
        }

    def _count_skipped(self, step: int, values: dict[str, float]) -> None:
        skipped = int(values.pop("actor/skipped", 0.0) + values.pop("critic/skipped", 0.0))
        if not skipped:
            return
        self.progress.skipped += skipped
        what = f"step {step}: {skipped} update(s) with a loss or gradient that is not finite"
        self.job.count_skipped(
            self.progress.skipped,
            warning=f"{what}, skipped",
            error=f"{what}; lower optimizer.lr, check this step's responses (rollout.record=true)"
            + (NARROW_HINT if "actor/loss_scale" in values else ""),
        )

    @contextmanager
    def _in_time(self, what: str) -> Iterator[None]:
        """A late worker, which the error names, is one that did not get the weights."""
        try:
            yield
        except Overdue as error:
            raise WeightUpdateError(f"{what}: {error} (rollout.update_timeout)") from error
