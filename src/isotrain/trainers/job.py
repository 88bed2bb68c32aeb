"""The life of a run, the same for supervised and online runs: resume, validate, save, end early, finish.

A `Recorder` has all outputs: metrics file, trackers, console; only one rank writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from isotrain.device.base import Device
from isotrain.engine.checkpoint.layout import FINISHING, is_writing
from isotrain.engine.checkpoint.reader import CheckpointReader
from isotrain.engine.checkpoint.resume_point import LostCheckpoint, lost_checkpoint, resume_point
from isotrain.engine.checkpoint.storage import open_storage
from isotrain.engine.checkpoint.writer import CheckpointWriter
from isotrain.engine.engine import TrainingEngine
from isotrain.engine.state import generator_shards, host_generators, restore, saved_counts, saved_shards
from isotrain.engine.world import World
from isotrain.errors import CheckpointError, NonFiniteError
from isotrain.models.weights import Shard
from isotrain.observe.console import Console
from isotrain.observe.loggers import Logger, open_loggers
from isotrain.observe.metrics import MetricsLog, named_errors, read_metrics
from isotrain.observe.run_directory import RunDirectory
from isotrain.observe.spans import SpanLog, rank_name
from isotrain.recipe.load import resolved
from isotrain.recipe.schema import Recipe, TrainerSection
from isotrain.trainers.preemption import Preempted, Preemption


class Recorder:
    """Only the progress at first; the rest joins once it is known which step the run goes on from."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.log: MetricsLog | None = None
        self.checkpoints: Path | None = None
        self.loggers: Sequence[Logger] = ()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self.log is not None:
            self.log.append(step, values)
        for logger in self.loggers:
            logger.write(step, values)
        self.console.update(step, values)

    def sync(self) -> None:
        """A checkpoint of a step must never be newer than the step's metrics on disk."""
        if self.log is not None:
            self.log.sync()

    def interrupted(self) -> None:
        """Say what the end of the run waits for."""
        if self.checkpoints is not None and is_writing(self.checkpoints):
            self.console.message(FINISHING)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
        for logger in self.loggers:
            logger.close()


@contextmanager
def recording(
    recorder: Recorder, recipe: Recipe, run: RunDirectory, done: int, is_main: bool = True
) -> Iterator[None]:
    """Metrics are cut back to the step that is resumed from, then go on."""
    if is_main:
        observe = recipe.observe
        with named_errors(run.path):
            run.keep_history(done)
        recorder.log = MetricsLog.resume(run.metrics, done)
        recorder.checkpoints = run.checkpoints
        recorder.loggers = open_loggers(
            observe.loggers,
            run_directory=run.path,
            project=observe.project,
            name=recipe.name,
            config=resolved(recipe),
            warn=recorder.console.message,
        )
    try:
        yield
    except BaseException as error:
        recorder.console.ended(error)
        raise
    else:
        recorder.console.ended(None)
    finally:
        recorder.close()


def draw_plots(run: RunDirectory, name: str, console: Console) -> None:
    """Plot a finished run; a full disk costs the plots, not the run."""
    from isotrain.observe.plots import plot_run  # with matplotlib, which only this process needs, and late

    try:
        plot_run(read_metrics(run.metrics), run.plots, name=name)
    except OSError as error:
        console.message(f"warning: no plots in {run.plots}: {error}")


# Appended to advice about numbers that are not finite, where the loss has a scale.
NARROW_HINT = ", or set model.dtype=bfloat16: numbers above 65504 are infinite in float16"

# A run without `trainer.save_every` loses at most this much when it dies.
MINUTES = 10.0
# A save that holds training up for longer than this share of the time between two is done less often.
LARGEST_SHARE = 0.05


class SaveSchedule:
    """Every so many steps; by the clock if `every` is None; always after the last step.

    A step takes a second or an hour: only the clock can promise how much is lost. Which steps are saved then
    differs from run to run; a checkpoint changes no number, so what is trained does not. Clocks differ
    between ranks as well: one decides for all.
    """

    def __init__(self, every: int | None, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.every, self.steps, self._clock = every, steps, clock
        self._last, self._pause = clock(), 60 * MINUTES

    def is_due(self, step: int) -> bool:
        if step == self.steps:
            return True
        if self.every is None:
            return self._clock() - self._last >= self._pause
        return self.every > 0 and step % self.every == 0

    def saved(self, seconds: float) -> None:
        """A save is done, and training waited so long for it."""
        self._last, self._pause = self._clock(), max(60 * MINUTES, seconds / LARGEST_SHARE)


class ResumeState(NamedTuple):
    """The checkpoint that a run resumes from; step 0 without one."""

    step: int
    state: dict[str, Any]
    """The loop's counts, as they were saved."""
    complaints: list[str]
    lost: LostCheckpoint | None = None

    def report(self, message: Callable[[str], None]) -> None:
        """Warn of checkpoints that cannot be used; raises if none is left of a run that had some."""
        for complaint in self.complaints:
            message(f"warning: {complaint}")
        if self.lost is not None:
            if self.lost.fatal:
                raise CheckpointError(self.lost.words)
            message(f"warning: {self.lost.words}")


@dataclass
class RankCheckpoints:
    """One rank's part of the checkpoints: the state of its engines, each under a prefix of its own."""

    run: RunDirectory
    device: Device
    engines: Mapping[str, TrainingEngine]
    writer: CheckpointWriter

    @classmethod
    def open(
        cls,
        run: RunDirectory,
        trainer: TrainerSection,
        device: Device,
        engines: Mapping[str, TrainingEngine],
        spans: SpanLog | None = None,
    ) -> RankCheckpoints:
        world, storage = engines[""].world, open_storage(trainer.checkpoint_storage)
        keep = trainer.keep_checkpoints
        writer = CheckpointWriter(run.checkpoints, world.rank, world.size, keep, storage, run.saved, spans)
        return cls(run, device, engines, writer)

    def newest(self) -> tuple[CheckpointReader | None, ResumeState]:
        """The newest valid checkpoint, to be restored; all ranks ask at the same time."""
        world, storage = self.engines[""].world, self.writer.storage
        reader, complaints = resume_point(self.run.checkpoints, world, storage)
        lost = lost_checkpoint(self.run, world, reader, storage)
        if reader is None:
            return None, ResumeState(0, {}, complaints, lost)
        return reader, ResumeState(reader.step, dict(reader.state), complaints, lost)

    def restore(self, reader: CheckpointReader) -> None:
        for prefix, engine in self.engines.items():
            restore(engine, self.device, reader, prefix)

    def save(self, step: int, state: Mapping[str, Any], *, copied: bool = False) -> None:
        """Begin to write; `copied` as in `CheckpointWriter.save`."""
        shards: dict[str, Shard] = {}
        counts: dict[str, float] = {}
        for prefix, engine in self.engines.items():
            shards |= saved_shards(engine, prefix)
            counts |= saved_counts(engine, prefix)
            if copied:
                engine.before_reuse = self.writer.join
        shards |= generator_shards(self.device)
        self.writer.save(step, shards, host_generators(), {**state, **counts}, copied=copied)

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk."""
        self.writer.wait()
        if failure := self.writer.failure():
            raise CheckpointError(failure)


class Trainer(Protocol):
    """The parts of a run's life that differ between the supervised and the online loop."""

    def train(self, done: int) -> None:
        """All steps after `done`: a loop over `Job.steps_after` that ends each with `Job.end_step`."""

    def validate(self, step: int) -> dict[str, float]: ...

    def save(self, step: int) -> None:
        """Begin to write a checkpoint."""

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk."""

    def begin_profile(self, step: int) -> None:
        """Record who does what, until `end_profile`."""

    def end_profile(self, step: int) -> None: ...


@dataclass
class Job:
    run: RunDirectory
    recorder: Recorder
    steps: int
    last_step: int
    """Where this run ends: a probe of later steps ends before the schedule does."""
    saves: SaveSchedule
    validates: bool = False
    """Whether there is anything to validate on."""
    validate_every: int = 0
    validate_first: bool = False
    max_skipped: int = 0
    """Updates that may be skipped because a number was not finite."""
    preemption: Preemption = field(default_factory=Preemption)
    world: World | None = None
    """The ranks that run the same loop; None for the one process that controls an online run."""
    profiled: Collection[int] = ()
    """Steps of which it is recorded who did what when."""
    spans: SpanLog = field(default_factory=lambda: SpanLog("controller"))
    """Those of this process, where such steps are asked for."""

    @property
    def is_main(self) -> bool:
        return self.world is None or self.world.is_main

    def train(self, trainer: Trainer, recipe: Recipe, done: int) -> None:
        """From the step after `done` to the last, with all outputs open."""
        console = self.recorder.console
        if done:
            console.message(f"resuming after step {done} of {self.steps}")
        with recording(self.recorder, recipe, self.run, done, self.is_main):
            console.start(self.last_step, done + 1)
            trainer.train(done)

    def close(self, name: str) -> None:
        """Plot a run that has reached its last step, and say what is next."""
        if self.is_main:
            console = self.recorder.console
            draw_plots(self.run, name, console)
            steps = f"{self.last_step} step" + ("s" if self.last_step != 1 else "")
            console.message(f"done: {steps} in {self.run.path}; curves in {self.run.plots}")
            console.message(f"next: isotrain export {self.run.path} --out DIR")

    def steps_after(self, done: int, trainer: Trainer) -> Iterator[int]:
        """The numbers of the steps to train; before the first of all, a validation if it is asked for."""
        if done == 0 and self.validates and self.validate_first:
            self.recorder.write(0, trainer.validate(0))
        for step in range(done + 1, self.last_step + 1):
            self.preemption.begin(step)
            if step in self.profiled:
                trainer.begin_profile(step)
                yield step
                trainer.end_profile(step)
            else:
                yield step

    def validates_after(self, step: int) -> bool:
        is_due = step == self.steps or (self.validate_every > 0 and step % self.validate_every == 0)
        return self.validates and is_due

    def count_skipped(self, skipped: int, warning: str, error: str) -> None:
        """Warn of skipped updates, or end the run if it has skipped more than it may."""
        if skipped > self.max_skipped:
            raise NonFiniteError(f"{error}, or set trainer.non_finite=skip and trainer.max_skipped_steps")
        self.recorder.console.message(f"warning: {warning}")

    def end_step(self, step: int, values: Mapping[str, float], trainer: Trainer) -> float:
        """Write the metrics and, if it is due, a checkpoint; returns the seconds that training waited for it.

        A run that was asked to end saves and raises `Preempted`.
        """
        with self.spans.span("write_metrics"):
            self.recorder.write(step, values)
            due, preempted = self._agree(step)
        seconds = self._save(step, trainer) if due or preempted else 0.0
        if preempted and step < self.last_step:
            self.finish(trainer)
            raise Preempted
        return seconds

    def _agree(self, step: int) -> tuple[bool, bool]:
        """Whether a checkpoint is due, and whether the run was asked to end: the same on all ranks."""
        due, preempted = self.saves.is_due(step), self.preemption.requested
        # Each rank has its own clock and gets its own signals.
        if self.world is not None and self.world.size > 1:
            due, preempted = map(bool, self.world.sum([due and self.is_main, preempted]))
        if preempted:
            self.preemption.announce()
        return due, preempted

    def _save(self, step: int, trainer: Trainer) -> float:
        started = time.perf_counter()
        with self.spans.span("save"):
            self.recorder.sync()
            trainer.save(step)
        seconds = time.perf_counter() - started
        self.saves.saved(seconds)
        return seconds

    def warn_save_failure(self, failure: str | None) -> None:
        if failure:
            self.recorder.console.message(f"warning: {failure}; training continues without it")

    def finish(self, trainer: Trainer) -> None:
        trainer.finish()
        self.preemption.saved()


def build_job(
    recipe: Recipe,
    recorder: Recorder,
    steps: int,
    preemption: Preemption | None,
    *,
    validates: bool,
    world: World | None = None,
) -> Job:
    trainer, profiled = recipe.trainer, recipe.observe.profile.steps
    name = "controller" if world is None else rank_name(world.rank)
    return Job(
        run=RunDirectory(recipe.output),
        recorder=recorder,
        steps=steps,
        last_step=recipe.observe.last_step(steps),
        # A truth trains nothing: there is nothing to keep.
        saves=SaveSchedule(trainer.save_every, 0 if recipe.observe.truth else steps),
        validates=validates,
        validate_every=trainer.validate_every,
        validate_first=trainer.validate_first,
        max_skipped=trainer.max_skipped_steps if trainer.non_finite == "skip" else 0,
        preemption=preemption or Preemption(),
        world=world,
        profiled=profiled,
        spans=SpanLog(name, on=bool(profiled)),
    )
