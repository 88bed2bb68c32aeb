"""The supervised loop: draw, step, validate, record, save; and its tasks, fine-tuning as the simplest."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from isotrain.data.loader import BatchLoader, StepData
from isotrain.device.base import Device
from isotrain.engine.engine import Loss, TrainingEngine, UpdateResult
from isotrain.engine.optimizer import Schedule
from isotrain.errors import ZeroGradientError
from isotrain.models.config import training_flops
from isotrain.observe.spans import write_spans
from isotrain.trainers.job import NARROW_HINT, Job, RankCheckpoints
from isotrain.trainers.preemption import Preempted
from isotrain.trainers.profiling import RankProfile

Step = TypeVar("Step", contravariant=True)


class Task(Protocol[Step]):
    def update(self, data: Step, lr: float) -> UpdateResult:
        """Learn from one step; `metrics` of the result are means over it."""

    def evaluate(self, steps: Iterable[Step]) -> dict[str, float]:
        """Loss and metrics over all given steps, without learning."""


@dataclass(frozen=True)
class SftTask:
    engine: TrainingEngine
    loss: Loss

    def update(self, data: StepData, lr: float) -> UpdateResult:
        return self.engine.step([batch.packed for batch in data.batches], self.loss, lr)

    def evaluate(self, steps: Iterable[StepData]) -> dict[str, float]:
        batches = ([batch.packed for batch in step.batches] for step in steps)
        return {"loss": self.engine.evaluate(batches, self.loss)}


# A first batch can be in balance by chance, as one of soft labels 0.5 is; ten in a row are not.
MAX_ZERO_GRADIENTS = 10


@dataclass
class UpdateCounts:
    """The loop's counts in a checkpoint, beside the number of samples that were taken."""

    skipped: int = 0
    """Updates without effect, because a number was not finite."""
    has_learnt: bool = False
    """Whether an update had a gradient, before the last checkpoint too."""
    zero_gradients: int = 0
    """Updates without a gradient before the first that has one."""


@dataclass
class SupervisedTrainer:
    job: Job
    engine: TrainingEngine
    device: Device
    task: Task[Any]
    schedule: Schedule
    loader: BatchLoader
    validation: BatchLoader | None
    checkpoints: RankCheckpoints
    peak_flops: float | None
    counts: UpdateCounts = field(default_factory=UpdateCounts)
    profile: RankProfile | None = None
    """Needed where the job has steps to profile."""

    def train(self, done: int) -> None:
        """From the step after `done` to the last of this run."""
        try:
            self._train(done)
        except (KeyboardInterrupt, Preempted):
            if self.engine.world.size == 1:  # otherwise the launcher, which got the signal, ends all ranks
                self.job.recorder.interrupted()
                self.checkpoints.writer.wait()
            raise

    def _train(self, done: int) -> None:
        for step in self.job.steps_after(done, self):
            started = time.perf_counter()
            with self.job.spans.span("data"):
                data = self.loader.next_step()
            with self.job.spans.span("update"):
                result = self.task.update(data, self.schedule(step))
                self.device.synchronize()
            values = self._values(step, result, data, time.perf_counter() - started)
            self._count_skipped(step, result)
            self._check_gradient(step, result)
            if self.job.validates_after(step):
                with self.job.spans.span("validate"):
                    values |= self.validate(step)
            self.job.end_step(step, values, self)
            self.job.warn_save_failure(self.checkpoints.writer.failure())
        self.job.finish(self)

    def validate(self, step: int) -> dict[str, float]:
        assert self.validation is not None
        metrics = self.task.evaluate(self.validation.one_pass())
        return {f"val/{name}": value for name, value in metrics.items()}

    def _values(self, step: int, result: UpdateResult, data: StepData, seconds: float) -> dict[str, float]:
        ranks = self.engine.world.size
        values = {
            "train/loss": result.loss,
            # Overflowed, it is no number: the curve has a gap there.
            **({} if result.overflowed else {"train/grad_norm": result.grad_norm}),
            "train/lr": self.schedule(step),
            "train/tokens": data.tokens,
            **{f"train/{name}": value for name, value in {**result.metrics, **result.scale_metrics}.items()},
            **({} if result.router_aux_loss is None else {"train/router_aux_loss": result.router_aux_loss}),
            "timing_s/step": seconds,
            "perf/throughput": data.tokens / (seconds * ranks),
            "perf/max_memory_allocated_gb": self.device.memory().peak / 2**30,
        }
        if self.peak_flops is not None:
            flops = training_flops(
                *self.engine.parameter_counts, self.engine.model.pretrained.config, data.lengths
            )
            values["perf/mfu"] = flops / (seconds * ranks * self.peak_flops)
        return values

    def _count_skipped(self, step: int, result: UpdateResult) -> None:
        if result.applied or result.overflowed:
            return
        self.counts.skipped += 1
        what = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}: not finite"
        total = f" ({self.counts.skipped} updates skipped)" if self.job.max_skipped else ""
        self.job.count_skipped(
            self.counts.skipped,
            warning=f"{what}, update skipped",
            error=f"{what}{total}; lower optimizer.lr, check this step's samples"
            + (NARROW_HINT if result.scale_metrics else ""),
        )

    def _check_gradient(self, step: int, result: UpdateResult) -> None:
        """End a run in which nothing is learnt: its metrics look calm, and its weights stay the same."""
        counts = self.counts
        counts.has_learnt = counts.has_learnt or (result.applied and result.grad_norm != 0)
        if counts.has_learnt:
            return
        counts.zero_gradients += result.applied
        if step < self.job.last_step and counts.zero_gradients < MAX_ZERO_GRADIENTS:
            return
        if not counts.zero_gradients:
            raise ZeroGradientError(
                f"all {step} updates up to step {step} were skipped, because loss or gradient "
                "was not finite: nothing is learnt; lower optimizer.lr, or check the samples"
            )
        raise ZeroGradientError(
            f"step {step}: the gradient of every update so far is exactly 0 and the loss is {result.loss:g}: "
            "nothing is learnt, because no sample has a target that the loss counts; check labels and "
            "margins of the rows (`isotrain preview` shows them) and the weights in `algorithm`"
        )

    def save(self, step: int) -> None:
        state = {"taken": self.loader.sampler.taken, **asdict(self.counts)}
        self.checkpoints.save(step, {name: int(value) for name, value in state.items()})

    def finish(self) -> None:
        self.checkpoints.writer.wait()
        self.engine.world.barrier()  # the end of a preempted rank ends those that are still writing
        self.checkpoints.finish()

    def begin_profile(self, step: int) -> None:
        assert self.profile is not None
        self.profile.begin()

    def end_profile(self, step: int) -> None:
        assert self.profile is not None
        rank = self.engine.world.rank
        spans, problem = self.profile.end(step)
        problem = write_spans(self.job.run, step, f"rank-{rank}", spans) or problem
        if problem:
            self.job.recorder.console.message(f"warning: {problem}")

    def resume(self) -> int:
        """Restore the newest valid checkpoint, if there is one; returns the steps done."""
        reader, resumed = self.checkpoints.newest()
        resumed.report(self.job.recorder.console.message)
        if reader is None:
            return 0
        self.checkpoints.restore(reader)
        self.loader.sampler.taken = int(reader.state["taken"])
        self.counts = UpdateCounts(
            skipped=int(reader.state["skipped"]),
            # Checkpoints of earlier versions do not have these.
            has_learnt=bool(reader.state.get("has_learnt", 1)),
            zero_gradients=int(reader.state.get("zero_gradients", 0)),
        )
        return reader.step
