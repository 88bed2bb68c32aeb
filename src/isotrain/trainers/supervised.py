"""The supervised loop: draw, step, validate, record, save."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from isotrain.data.loader import BatchLoader, StepData
from isotrain.device.base import Device
from isotrain.engine.checkpoint.resume_point import lost_checkpoint, resume_point
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.engine.engine import TrainingEngine, UpdateResult
from isotrain.engine.schedule import Schedule
from isotrain.engine.state import generator_shards, host_generators, optimizer_updates, restore, saved_shards
from isotrain.errors import CheckpointError, NonFiniteError, ZeroGradientError
from isotrain.models.flops import training_flops
from isotrain.observe.console import Console
from isotrain.observe.run_directory import RunDirectory
from isotrain.trainers.preemption import Preempted, Preemption
from isotrain.trainers.recorder import Recorder
from isotrain.trainers.save_schedule import SaveSchedule
from isotrain.trainers.tasks.base import Task

# A first batch can be in balance by chance, as one of soft labels 0.5 is; ten in a row are not.
MAX_ZERO_GRADIENTS = 10


@dataclass
class SupervisedTrainer:
    engine: TrainingEngine
    device: Device
    task: Task[Any]
    schedule: Schedule
    loader: BatchLoader
    validation: BatchLoader | None
    writer: CheckpointWriter
    recorder: Recorder
    steps: int
    last_step: int
    """Where this run ends: a probe of later steps ends before the schedule does."""
    validate_every: int
    validate_first: bool
    saves: SaveSchedule
    max_skipped: int
    """Updates that may be skipped because a number was not finite."""
    peak_flops: float | None
    preemption: Preemption = field(default_factory=Preemption)
    skipped: int = 0
    zero_gradients: int = 0
    """Updates without a gradient before the first that has one."""
    has_learnt: bool = False
    """Whether an update had a gradient, before the last checkpoint too."""

    def train(self, done: int) -> None:
        """From the step after `done` to the last of this run."""
        try:
            self._train(done)
        except (KeyboardInterrupt, Preempted):
            if self.engine.world.size == 1:  # otherwise the launcher, which got the signal, ends all ranks
                self.recorder.interrupted()
                self.writer.wait()
            raise

    def _train(self, done: int) -> None:
        if done == 0 and self.validate_first and self.validation is not None:
            self.recorder.write(0, self._validate(self.validation))
        for step in range(done + 1, self.last_step + 1):
            self.preemption.begin(step)
            started = time.perf_counter()
            data = self.loader.next_step()
            result = self.task.update(data, self.schedule(step))
            self.device.synchronize()
            values = self._values(step, result, data, time.perf_counter() - started)
            self._count_skipped(step, result)
            self._check_gradient(step, result)
            if self.validation is not None and self._is_due(step, self.validate_every):
                values |= self._validate(self.validation)
            self.recorder.write(step, values)
            due, preempted = self._agreed(step)
            if due or preempted:
                self._save(step)
            if preempted and step < self.last_step:
                self._finish()
                raise Preempted
            if failure := self.writer.failure():
                self.recorder.console.message(f"warning: {failure}; training continues without it")
        self._finish()

    def _finish(self) -> None:
        """Until the last checkpoint is on disk."""
        self.writer.wait()
        self.engine.world.barrier()  # the end of a preempted rank ends those that are still writing
        if failure := self.writer.failure():
            raise CheckpointError(failure)
        self.preemption.saved()

    def _validate(self, loader: BatchLoader) -> dict[str, float]:
        return {f"val/{name}": value for name, value in self.task.evaluate(loader.one_pass()).items()}

    def _is_due(self, step: int, every: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)

    def _agreed(self, step: int) -> tuple[bool, bool]:
        """Whether a checkpoint is due, and whether the run was asked to end: the same on all ranks."""
        world, due, preempted = self.engine.world, self.saves.is_due(step), self.preemption.requested
        if world.size > 1:  # every rank has a clock and gets signals of its own
            due, preempted = map(bool, world.sum([due and world.leads, preempted]))
        if preempted:
            self.preemption.announce()
        return due, preempted

    def _values(self, step: int, result: UpdateResult, data: StepData, seconds: float) -> dict[str, float]:
        ranks = self.engine.world.size
        values = {
            "train/loss": result.loss,
            "train/grad_norm": result.grad_norm,
            "train/lr": self.schedule(step),
            "train/tokens": data.tokens,
            **{f"train/{name}": value for name, value in result.metrics.items()},
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
        if result.applied:
            return
        self.skipped += 1
        what = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}"
        if self.skipped > self.max_skipped:
            left_out = f" ({self.skipped} updates skipped)" if self.max_skipped else ""
            raise NonFiniteError(
                f"{what}: not finite{left_out}; lower optimizer.lr, check this step's samples, "
                "or set trainer.non_finite=skip and trainer.max_skipped_steps"
            )
        self.recorder.console.message(f"warning: {what}: not finite, update skipped")

    def _check_gradient(self, step: int, result: UpdateResult) -> None:
        """End a run in which nothing is learnt: its metrics look calm, and its weights stay the same."""
        self.has_learnt = self.has_learnt or (result.applied and result.grad_norm != 0)
        if self.has_learnt:
            return
        self.zero_gradients += result.applied
        if step < self.last_step and self.zero_gradients < MAX_ZERO_GRADIENTS:
            return
        if not self.zero_gradients:
            raise ZeroGradientError(
                f"all {self.skipped} updates up to step {step} were skipped, because loss or gradient was "
                "not finite: nothing is learnt; lower optimizer.lr, or check the samples"
            )
        raise ZeroGradientError(
            f"step {step}: the gradient of every update so far is exactly 0 and the loss is {result.loss:g}: "
            "nothing is learnt, because no sample has a target that the loss counts; check labels and "
            "margins of the rows (`isotrain preview` shows them) and the weights in `algorithm`"
        )

    def _save(self, step: int) -> None:
        started = time.perf_counter()
        self.recorder.sync()
        state = {
            "taken": self.loader.sampler.taken,
            "skipped": self.skipped,
            "updates": optimizer_updates(self.engine),
            "has_learnt": int(self.has_learnt),
            "zero_gradients": self.zero_gradients,
        }
        shards = saved_shards(self.engine) | generator_shards(self.device)
        self.writer.save(step, shards, host_generators(), state)
        self.saves.saved(time.perf_counter() - started)

    def resume(self, run: RunDirectory, console: Console) -> int:
        """Go on from the newest valid checkpoint, if there is one; returns the steps done."""
        reader, complaints = resume_point(run.checkpoints, self.engine.world, self.writer.storage)
        for complaint in complaints:
            console.message(f"warning: {complaint}")
        if loss := lost_checkpoint(run, self.engine.world, reader, self.writer.storage):
            loss.tell(console.message)
        if reader is None:
            return 0
        restore(self.engine, self.device, reader)
        self.loader.sampler.taken = int(reader.state["taken"])
        self.skipped = int(reader.state["skipped"])
        # Checkpoints of earlier versions do not say it.
        self.has_learnt = bool(reader.state.get("has_learnt", 1))
        self.zero_gradients = int(reader.state.get("zero_gradients", 0))
        console.message(f"resuming after step {reader.step} of {self.steps}")
        return reader.step
