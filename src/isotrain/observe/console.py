"""The console: progress and metrics of a run."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from isotrain.terminal import beneath, guard, rich_console

RECENT_STEPS = 20
SHORT_RUN = 100
SECONDS_BETWEEN_LINES = 30.0

# The metrics of a step to show. A narrow terminal cuts off the end, so the most important come first. Of
# metrics with the same label, the first one present is shown.
SHOWN: tuple[tuple[str, str, str], ...] = (
    ("critic/rewards/mean", "reward", ".3f"),
    ("critic/score/mean", "score", ".3f"),
    ("train/loss", "loss", ".4f"),
    ("train/accuracy", "accuracy", ".3f"),
    ("train/f1", "f1", ".3f"),
    ("train/margin", "margin", ".3f"),
    ("response_length/mean", "length", ".0f"),
    ("actor/kl_loss", "kl", ".4f"),
    ("actor/reward_kl_penalty", "kl", ".4f"),
    ("actor/ppo_kl", "ppo_kl", ".4f"),
    ("actor/entropy", "entropy", ".3f"),
    ("actor/pg_loss", "pg_loss", ".4f"),
    ("train/lr", "lr", ".1e"),
    ("train/grad_norm", "grad_norm", ".3g"),
    ("actor/grad_norm", "grad_norm", ".3g"),
)


class Console:
    """Shows nothing: for every rank but the first, and as a base class."""

    def start(self, total_steps: int, first_step: int) -> None:
        """Called once; `first_step` is the first that this process takes, 1 unless the run is resumed."""

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Called after each step with its metrics under their full names."""

    def waiting(self, text: str) -> None:
        """Called about every second with what the current step waits for; empty when it waits no longer."""

    def message(self, text: str) -> None:
        """A message for a person, between two steps."""

    def ended(self, error: BaseException | None) -> None:
        """Called once, when training has ended, with what ended it early."""

    def close(self) -> None: ...

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WarningConsole(Console):
    """Only warnings, on stderr."""

    def message(self, text: str) -> None:
        if text.startswith("warning:"):
            with suppress(OSError, ValueError):  # the terminal or pipe is gone
                print(text, file=sys.stderr, flush=True)


class LineConsole(Console):
    """Plain lines for log files: each step of a short run, about a hundred lines of a long one."""

    def __init__(
        self, stream: IO[str] | None = None, *, devices: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream: IO[str] | None = stream or sys.stdout
        self._devices, self._clock = devices, clock
        self._total = self._step = 0
        self._told = clock()

    def start(self, total_steps: int, first_step: int) -> None:
        self._total, self._first = total_steps, first_step
        self._timer = StepTimer(total_steps, first_step - 1, self._clock())
        self._line_step, self._line_time = first_step - 1, self._clock()
        self._step, self._told = first_step - 1, self._clock()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        now = self._clock()
        self._timer.update(step, now)
        self._step, self._told = step, now
        validation = describe_validation(values)
        if self._is_due(step, now) or validation:
            self._line_step, self._line_time = step, now
            parts = [f"step {step}/{self._total}", *describe(values, self._devices), *validation]
            self.message("  ".join([*parts, f"eta {self._timer.eta()}"]))

    def waiting(self, text: str) -> None:
        """A line only where a step takes so long that its own is far away."""
        now = self._clock()
        if text and self._total and now - self._told >= SECONDS_BETWEEN_LINES:
            self._told = now
            self.message(f"in step {self._step + 1}/{self._total}: {text}")

    def message(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except OSError:
            # The terminal or pipe is gone; the run and its metrics.jsonl are not.
            self._stream = None

    def _is_due(self, step: int, now: float) -> bool:
        steps_here = self._total - self._first + 1
        if steps_here <= SHORT_RUN or step in (self._first, self._total):
            return True
        far_enough = (step - self._line_step) * 100 >= steps_here
        return far_enough or now - self._line_time >= SECONDS_BETWEEN_LINES


class BarConsole(Console):
    """A live bar for terminals; messages and validation results scroll by above it."""

    def __init__(
        self, console: RichConsole, *, devices: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._devices, self._clock = devices, clock
        self._task: TaskID | None = None
        self._metrics = self._waiting = ""
        count = "[bold]{task.completed:.0f}[/]/{task.total:.0f}"
        self._bar = RichProgress(
            TextColumn(count, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=max(8, min(30, console.width - 80))),
            # A narrow terminal cuts off the last metrics before the step and the time.
            TextColumn("{task.fields[shown]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            TextColumn("eta [cyan]{task.fields[eta]}[/]", table_column=Column(no_wrap=True)),
            console=console,
            refresh_per_second=2,
            expand=True,
        )

    def start(self, total_steps: int, first_step: int) -> None:
        self._total = total_steps
        self._timer = StepTimer(total_steps, first_step - 1, self._clock())
        self._task = self._bar.add_task(
            "", total=total_steps, completed=first_step - 1, shown=self._shown(), eta="?"
        )
        self._bar.start()
        # The bar has replaced the streams by its own, which would take colours from what others print.
        guard()

    def update(self, step: int, values: Mapping[str, float]) -> None:
        assert self._task is not None
        self._timer.update(step, self._clock())
        self._metrics = "  ".join(describe(values, self._devices))
        self._bar.update(self._task, completed=step, shown=self._shown(), eta=self._timer.eta())
        validation = describe_validation(values)
        if validation:
            self.message("  ".join([f"step {step}/{self._total}", *validation]))

    def waiting(self, text: str) -> None:
        self._waiting = text
        if self._task is not None:
            self._bar.update(self._task, shown=self._shown())

    def _shown(self) -> str:
        return "  ".join(filter(None, [self._waiting, self._metrics]))

    def message(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


class StepTimer:
    """Time to the end of the run, from the recent steps that this process took."""

    def __init__(self, total_steps: int, done: int, now: float) -> None:
        self._left = total_steps - done
        # The start, then the last few updates: where the window begins and ends is all that counts.
        self._seen: deque[tuple[int, float]] = deque([(done, now)], maxlen=RECENT_STEPS + 1)
        self._total = total_steps
        self._warm = False

    def update(self, step: int, now: float) -> None:
        if step == 0:  # a validation before the first step
            self._seen[0] = (0, now)
            return
        self._seen.append((step, now))
        self._left = self._total - step
        # The first step pays for compilation and cold caches, so it counts only until there is a second.
        if not self._warm and len(self._seen) == 3:
            self._seen.popleft()
            self._warm = True

    def eta(self) -> str:
        (first_step, first_time), (last_step, last_time) = self._seen[0], self._seen[-1]
        if last_step == first_step:
            return "?"
        return format_seconds((last_time - first_time) / (last_step - first_step) * self._left)


def open_console(*, silent: bool = False, console: RichConsole | None = None, devices: int = 1) -> Console:
    """A bar on a terminal, lines anywhere else, for `silent` nothing but warnings.

    `perf/throughput` counts tokens for each device; with more than one of them the console says so.
    """
    if silent:
        return WarningConsole()
    # The bar needs the stream itself: while it is drawn, `sys.stdout` leads back to it.
    bar = console or rich_console(file=beneath(sys.stdout))
    if bar.is_terminal and not bar.is_dumb_terminal:
        return BarConsole(bar, devices=devices)
    return LineConsole(console.file if console else sys.stdout, devices=devices)


def describe(values: Mapping[str, float], devices: int = 1) -> list[str]:
    """The metrics of a training step, such as `loss 1.2345`, as far as they are there."""
    shown: dict[str, str] = {}
    for name, label, form in SHOWN:
        if name in values:
            shown.setdefault(label, f"{values[name]:{form}}")
    if shown.get("score") == shown.get("reward"):
        # They differ only where something is added to or taken from the score.
        shown.pop("score", None)
    if "kl" in shown:
        # The distance from the reference says more than that from the policy that sampled.
        shown.pop("ppo_kl", None)
    parts = [f"{label} {value}" for label, value in shown.items()]
    if "critic/rewards/mean" in values and "timing_s/step" in values:
        # An online step takes long enough for a person to wait for it.
        parts.append(f"{values['timing_s/step']:.1f} s/step")
    if "perf/throughput" in values:
        parts.append(f"{values['perf/throughput']:,.0f} tok/s" + ("/device" if devices > 1 else ""))
    return parts


def describe_validation(values: Mapping[str, float]) -> list[str]:
    parts = [f"val_loss {values['val/loss']:.4f}"] if "val/loss" in values else []
    others = [name for name in values if name.startswith(("val/", "val-core/")) and name != "val/loss"]
    return parts + [f"{name} {values[name]:.4g}" for name in others]


def format_seconds(seconds: float) -> str:
    whole = round(seconds)
    minutes, hours = whole // 60 % 60, whole // 3600
    if hours:
        return f"{hours}:{minutes:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"
