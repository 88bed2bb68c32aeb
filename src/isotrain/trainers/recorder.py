"""All outputs of a run behind one object: metrics file, trackers, console; only one rank writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from isotrain.engine.checkpoint.layout import FINISHING, is_writing
from isotrain.observe.console import Console
from isotrain.observe.loggers import Logger, open_loggers
from isotrain.observe.metrics import MetricsLog, named_errors, read_metrics
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.load import resolved
from isotrain.recipe.schema import Recipe


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
