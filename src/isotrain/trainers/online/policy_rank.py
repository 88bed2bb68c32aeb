"""A training rank of an online run: the models that learn or score, led by the controller call by call.

R: trajectories, N: their response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from isotrain.algorithms import mismatch as mismatches
from isotrain.algorithms.mismatch import NOT_MEASURED, Mismatch
from isotrain.cluster.objects import fetch
from isotrain.data.encode import Prompt
from isotrain.data.packing import ExpertRoutes, pack_trajectories
from isotrain.data.pictures import Picture
from isotrain.data.record import Recorded, step_file, write_trajectories
from isotrain.data.store import SampleStore
from isotrain.data.trajectory import Trajectory
from isotrain.engine.engine import InferenceModel
from isotrain.engine.offload import offload, onload
from isotrain.engine.world import open_store
from isotrain.errors import RolloutError
from isotrain.models.attention import shares_prompts
from isotrain.models.lora import adapters_off
from isotrain.observe.environment import describe_environment
from isotrain.observe.run_directory import RunDirectory
from isotrain.observe.spans import SpanLog, rank_name, spanned
from isotrain.recipe.online import OnlineSection
from isotrain.recipe.schema import Recipe
from isotrain.trainers.build import TRAIN, open_prompts
from isotrain.trainers.job import RankCheckpoints, ResumeState
from isotrain.trainers.online.build_rank import Models, advantage_settings, build_models, update_settings
from isotrain.trainers.online.messages import (
    RankPlan,
    RankRecord,
    RankScores,
    RankStep,
)
from isotrain.trainers.online.metrics import timed
from isotrain.trainers.online.step import (
    AdvantageMetrics,
    Micro,
    critic_moments,
    critic_objective,
    estimate,
    join_spans,
    penalties,
    policy_mismatch,
    policy_objective,
    span,
    update_means,
    whiten_all,
)
from isotrain.trainers.profiling import Profiled, RankProfile
from isotrain.trainers.start import attach_probes, describe_model
from isotrain.weights.file import remove_private_directory
from isotrain.weights.send import SendOrder, Sent, WeightSender


class Description(NamedTuple):
    """A description of the ranks for the user and the run directory."""

    device_type: str
    device_name: str
    environment: dict[str, object]
    """Environment of the rank's process, which need not be on the controller's machine."""
    parameters: int
    trained: int
    model: dict[str, Any]
    """How the policy is computed."""
    fused: str
    shares_prompts: bool
    """Whether all models can compute a prompt once for several responses."""


Penalty = tuple[int, float, float]
"""Number of a trajectory, its summed divergence from the reference, and the mean of a token."""


class StepReport(NamedTuple):
    """One rank's report of a step."""

    metrics: dict[str, float]
    """Metrics of the updates, over all ranks."""
    advantages: AdvantageMetrics
    mismatch: Mismatch
    seconds: dict[str, float]
    """Seconds of each part of the step."""
    peak_gb: float
    """Largest device memory since the start."""
    save_failure: str | None


class PolicyRank:
    """All ranks get the same calls in the same order: any of them may exchange tensors with the others."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.recipe = Recipe.model_validate(recipe)
        assert isinstance(self.recipe.algorithm, OnlineSection)
        self.algorithm = self.recipe.algorithm
        self.settings = update_settings(self.recipe, self.algorithm)
        self.estimation = advantage_settings(self.algorithm, self.recipe.reward)
        self.open = ExitStack()
        self.minis: list[list[Micro]] = []
        self.prepared = False
        self.seconds: dict[str, float] = {}
        self.spans = SpanLog("training rank", on=bool(self.recipe.observe.profile.steps))
        self.version = 0
        """Version of the policy's weights: the step that made them."""

    def open_store(self, host: str | None, directory: str | None) -> str:
        """Make the place where the ranks meet; asked of the first one."""
        return open_store(host, directory)

    def start(self, store: str) -> Description:
        """Join the other ranks and load the models."""
        recipe = self.recipe
        self.models: Models = build_models(recipe, self.algorithm, self.open, store)
        self.device, self.world = self.models.device, self.models.world
        self.policy = self.models.policy
        self.weights = WeightSender(self.policy, self.models.rollout_dtype, self.offload, self._pictures)
        self.run = RunDirectory(recipe.output)
        engines = {"": self.policy} | ({"critic/": critic} if (critic := self.models.critic) else {})
        self.checkpoints = RankCheckpoints.open(self.run, recipe.trainer, self.device, engines, self.spans)
        self.spans.worker, rank = rank_name(self.world.rank), self.world.rank
        self.profile = RankProfile(self.spans, self.run, self.device, rank, recipe.observe.profile.trace)
        return Description(
            self.device.type,
            self.device.name(),
            describe_environment({}, self.device.numerics_variables),
            sum(p.numel() for p in self.policy.model.parameters()),
            sum(p.numel() for p in self.policy.trained.values()),
            describe_model(self.policy.model),
            str(self.policy.model.fused),
            all(shares_prompts(engine.model.attention) for engine in self.models.all()),
        )

    def finds(self, file: str) -> bool:
        """Whether a file that the controller has written is on this machine too."""
        return Path(file).is_file()

    def resume(self) -> ResumeState:
        """Go on from the newest valid checkpoint, if there is one."""
        reader, resumed = self.checkpoints.newest()
        attach_probes(self.policy, self.recipe, resumed.step)
        if reader is not None:
            self.checkpoints.restore(reader)
        self.version = resumed.step
        return resumed

    def begin_profile(self) -> None:
        self.profile.begin()

    def end_profile(self, step: int) -> Profiled:
        return self.profile.end(step)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        with timed(self.seconds, name), self.spans.span(name):
            yield

    @spanned("load")
    def load(self, plan: RankPlan) -> list[int]:
        """Fetch this rank's trajectories; returns which of the plan's groups are lost, if any.

        Offloaded, they stay in host memory: the engines that may have to generate lost ones are awake.
        """
        fetched = fetch([handle for handle, _ in plan.groups])
        lost = [number for number, group in enumerate(fetched) if group is None]
        if lost:
            return lost
        by_number: dict[int, Trajectory] = {}
        for group, (_, first) in zip(fetched, plan.groups, strict=True):
            by_number.update(enumerate(group or (), start=first))
        self.minis = [
            [
                Micro(pack_trajectories([by_number[i] for i in m], m, plan.share_prompts, self._pictures))
                for m in mini
            ]
            for mini in plan.mini_batches
        ]
        if self.algorithm.router_replay == "R3" and any(t.routes_TLK is None for t in by_number.values()):
            raise RolloutError(
                "algorithm.router_replay: a response came without the experts of its tokens; record the run "
                "again with R3, or set router_replay: disabled"
            )
        self.totals = plan.totals
        self.prepared, self.seconds = False, {}
        self.trajectories = by_number
        if not self.offloaded:
            self._batches_to_device()
        return []

    @cached_property
    def _prompts(self) -> SampleStore[Prompt]:
        return open_prompts(self.recipe)[TRAIN]

    def _pictures(self, row: int) -> tuple[Picture, ...]:
        """Pictures of a prompt, from this machine's own store: pixels travel nowhere."""
        return self._prompts[row].pictures if self.recipe.data.image_key else ()

    def _batches_to_device(self) -> None:
        for micro in self.micros:
            micro.batch = micro.batch.to(self.world.device)

    @property
    def offloaded(self) -> bool:
        """Whether the device is another's now."""
        return self.policy.on_host is not None

    @property
    def micros(self) -> list[Micro]:
        return [micro for mini in self.minis for micro in mini]

    def prepare(self, old_logps: bool) -> list[Penalty]:
        """Infer what must be known before any update; returns KL penalties of this rank's trajectories."""
        penalties: list[Penalty] = []
        if old_logps:
            with self._timed("old_log_prob"):
                self._old_log_probs()
        if self.settings.kl_place != "off":
            with self._timed("ref"):
                penalties = self._reference_log_probs()
        distillation = self.settings.distillation
        if distillation is not None and not distillation.over_vocabulary:
            assert self.models.teacher is not None
            with self._timed("ref"):
                teacher_logps = self._logps(self.models.teacher)
            for micro, logp_N in zip(self.micros, teacher_logps, strict=True):
                micro.teacher_logp_N = logp_N
        if self.models.critic is not None:
            with self._timed("values"):
                self._values()
        self.prepared = True
        return penalties

    def learn(self, step: RankStep) -> StepReport:
        """Everything between scores of the loaded trajectories and new weights."""
        if not self.prepared:
            self.prepare(step.old_logps)
        with self._timed("adv"):
            advantages = self._advantages(step.given)
        metrics: dict[str, float] = {}
        if step.critic_lr is not None:
            with self._timed("update_critic"):
                metrics |= self._update_critic(step.critic_lr)
        if step.updates_policy:
            with self._timed("update_actor"):
                metrics |= self._update_policy(step.lr, step.given.kl_coefficient)
        self.version += 1
        mismatch = self._mismatch()
        if step.record is not None:
            with self._timed("record"):
                self._record(step.record)
        self.forget()
        peak, failure = self.device.memory().peak / 2**30, self.checkpoints.writer.failure()
        return StepReport(metrics, advantages, mismatch, self.seconds, peak, failure)

    def _old_log_probs(self) -> None:
        """Log-probs before the first update, which later ones are compared with."""
        if self.algorithm.router_replay == "R2":
            self._record_routes()
        for micro, logp_N in zip(self.micros, self._logps(self.policy), strict=True):
            micro.old_logp_N = logp_N

    def _record_routes(self) -> None:
        """From now on, the step's tokens take the routes that the policy has for them before its updates."""
        replay = self.policy.model.replay
        assert replay is not None
        for micro in self.micros:
            replay.record()
            (chosen_RLK,) = self.policy.infer([micro.batch.packed], lambda _: replay.recorded())
            packed = replace(micro.batch.packed, routes=ExpertRoutes(chosen_RLK, as_seen=True))
            micro.batch = replace(micro.batch, packed=packed)

    def _reference_log_probs(self) -> list[Penalty]:
        """The reference's log-probs; returns penalties of this rank's trajectories where they are rewards."""
        reference = self.models.reference
        with adapters_off(self.policy.model) if reference is None else nullcontext():
            results = self._logps(self.policy if reference is None else reference)
        for micro, logp_N in zip(self.micros, results, strict=True):
            micro.ref_logp_N = logp_N
        if self.settings.kl_place != "reward":
            return []
        estimator = self.settings.kl_estimator
        return [
            penalty
            for micro in self.micros
            if micro.old_logp_N is not None
            for penalty in penalties(micro, micro.old_logp_N, estimator)
        ]

    def _logps(self, forward: InferenceModel) -> list[torch.Tensor]:
        temperature = self.settings.temperature
        return forward.infer([m.batch.packed for m in self.micros], lambda head: head.logps(temperature))

    def _values(self) -> None:
        assert self.models.critic is not None
        batches = [micro.batch.packed for micro in self.micros]
        for micro, values_N in zip(
            self.micros, self.models.critic.infer(batches, lambda head: head.values()), strict=True
        ):
            micro.values_N = values_N

    @spanned("reward_model")
    def reward_model_scores(self, name: str) -> dict[int, float]:
        """A reward model's scores of this rank's trajectories."""
        trajectories = {i: self.trajectories[i] for micro in self.micros for i in micro.batch.index}
        return self.models.reward_models[name].scores(trajectories)

    def _advantages(self, given: RankScores) -> AdvantageMetrics:
        micros = self.micros
        estimate(
            micros,
            self.estimation,
            scores=given.scores,
            trajectory_advantages=given.advantages,
            greedy=given.greedy,
            kl_estimator=self.settings.kl_estimator,
            kl_coefficient=given.kl_coefficient if self.settings.kl_place == "reward" else 0.0,
        )
        critic = None if self.models.critic is None else critic_moments(micros)
        if self.estimation.estimator.whiten:
            whiten_all(micros, self.estimation, self.world.total)
        names = ["advantages", "returns"] + (["values"] if self.models.critic is not None else [])
        spans = {
            name: join_spans(span(getattr(m, f"{name}_N"), m.batch.mask_N) for m in micros) for name in names
        }
        return AdvantageMetrics(spans, critic)

    def _update_critic(self, lr: float) -> dict[str, float]:
        critic, clip, settings = self.models.critic, self.models.value_clip, self.settings
        assert critic is not None
        results = [
            critic.update([(m.batch.packed, critic_objective(m, totals, settings, clip)) for m in mini], lr)
            for _ in range(settings.ppo_epochs)
            for mini, totals in zip(self.minis, self.totals, strict=True)
        ]
        return update_means(results, "critic") | {"critic/lr": lr}

    def _update_policy(self, lr: float, kl_coefficient: float) -> dict[str, float]:
        settings, teacher, results = self.settings, self.models.teacher, []
        for _ in range(settings.ppo_epochs):
            for mini, totals in zip(self.minis, self.totals, strict=True):
                batches = [
                    (m.batch.packed, policy_objective(m, totals, settings, kl_coefficient, teacher))
                    for m in mini
                ]
                results.append(self.policy.update(batches, lr))
                if teacher is not None:
                    teacher.reshard()
                self._measure_no_more()
        self.device.synchronize()
        return update_means(results, "actor") | {"actor/lr": lr}

    def _measure_no_more(self) -> None:
        """Without old log-probs, only the first update computes those of the weights that sampled."""
        for micro in self.micros:
            if micro.mismatch is None and micro.old_logp_N is None:
                micro.mismatch = NOT_MEASURED

    def _mismatch(self) -> Mismatch:
        """As the first update has seen it; from the old log-probs in a step without one."""
        return mismatches.combine(
            [micro.mismatch or policy_mismatch(micro, micro.old_logp_N) for micro in self.micros]
        )

    @spanned("send_weights")
    def announce_weights(self, order: SendOrder) -> Sent:
        return self.weights.announce(order)

    @spanned("send_weights")
    def send_weights(self, order: SendOrder) -> Sent:
        return self.weights.send(order)

    def write_weights(self, order: SendOrder) -> Sent:
        """To files, of whatever version this rank has: its step may have gone on meanwhile."""
        return self.weights.send(replace(order, version=self.version))

    def close_senders(self) -> None:
        self.weights.close()

    def _record(self, given: RankRecord) -> None:
        """Write this rank's trajectories of the step to Parquet."""
        marks, advantages = given.marks, given.advantages
        numbers = [i for micro in self.micros for i in micro.batch.index]
        write_trajectories(
            step_file(Path(given.directory), given.step, self.world.data_rank),
            [
                Recorded(self.trajectories[i], marks[i], advantages[i] if advantages else None)
                for i in numbers
            ],
            self.world.data_ranks,
            given.others,
        )

    def forget(self) -> None:
        """The step is done: its trajectories may go."""
        self.minis, self.trajectories = [], {}

    @spanned("save")
    def save(self, step: int, state: Mapping[str, float]) -> str | None:
        """From the device, or from host memory if the models are there; returns how earlier saves failed."""
        self.checkpoints.save(step, state, copied=self.offloaded)
        return self.checkpoints.writer.failure()

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk."""
        self.checkpoints.finish()

    @spanned("offload")
    def offload(self, but_weights: bool = False) -> None:
        """Everything to host memory: the device is another's for a while. `but_weights` are the policy's."""
        for engine in self.models.all():
            offload(engine, keep_weights=but_weights and engine is self.policy)

    @spanned("onload")
    def onload(self) -> None:
        """Everything back to the device, with the trajectories of the step."""
        for engine in self.models.all():
            onload(engine)
        self._batches_to_device()

    def onload_reward_models(self) -> None:
        """Reward models alone, which is enough to score responses; `offload` ends it."""
        for scorer in self.models.reward_models.values():
            onload(scorer.model)

    def close(self) -> None:
        """Finish what is being written, remove what was shared, leave the other ranks."""
        self.checkpoints.writer.wait()
        remove_private_directory()
        self.open.close()
