from __future__ import annotations

import io
import time

import pytest
from rich.console import Console as RichConsole

from isotrain.observe.console import (
    BarConsole,
    LineConsole,
    StepTimer,
    describe,
    format_seconds,
    open_console,
)

VALUES = {
    "train/loss": 1.23456,
    "train/lr": 3e-3,
    "train/grad_norm": 0.51,
    "train/tokens": 4096.0,
    "perf/throughput": 1234.4,
    "timing_s/step": 0.8,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run_lines(total: int, first: int, seconds: float, **extra: float) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    with LineConsole(stream, clock=clock) as progress:
        progress.start(total, first)
        for step in range(first, total + 1):
            clock.now += seconds
            progress.update(step, {**VALUES, **extra})
    return stream.getvalue().splitlines()


def test_a_line_reads_as_documented() -> None:
    lines = run_lines(60, 1, 0.8)
    assert lines[19] == "step 20/60  loss 1.2346  lr 3.0e-03  grad_norm 0.51  1,234 tok/s  eta 0:32"
    assert len(lines) == 60, "a short run shows each step"
    assert lines[-1].endswith("eta 0:00")


ONLINE = {
    "critic/rewards/mean": 0.4123,
    "critic/score/mean": 0.4123,
    "actor/pg_loss": -0.0213,
    "actor/ppo_kl": 0.0004,
    "actor/entropy": 0.531,
    "actor/grad_norm": 0.312,
    "response_length/mean": 213.4,
    "timing_s/gen": 20.0,
    "timing_s/step": 34.21,
    "perf/throughput": 1234.4,
}


def test_an_online_step_reads_as_documented() -> None:
    assert "  ".join(describe(ONLINE)) == (
        "reward 0.412  length 213  ppo_kl 0.0004  entropy 0.531  pg_loss -0.0213  grad_norm 0.312  "
        "34.2 s/step  1,234 tok/s"
    )
    penalised = ONLINE | {"critic/rewards/mean": 0.3, "actor/kl_loss": 0.0123}
    assert "  ".join(describe(penalised)).startswith(
        "reward 0.300  score 0.412  length 213  kl 0.0123  entropy 0.531"
    )


def test_an_online_validation_is_shown_under_its_name() -> None:
    stream = io.StringIO()
    progress = LineConsole(stream)
    progress.start(100_000, 1)
    progress.update(1, ONLINE)
    progress.update(2, ONLINE)
    progress.update(3, ONLINE | {"val-core/openai/gsm8k/reward/mean@1": 0.2578125})
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and "  val-core/openai/gsm8k/reward/mean@1 0.2578  eta" in lines[1]


def test_a_long_run_is_thinned_but_shows_first_and_last() -> None:
    lines = run_lines(10_000, 1, 0.01)
    assert 100 <= len(lines) <= 102
    assert lines[0].startswith("step 1/10000") and lines[-1].startswith("step 10000/10000")


def test_slow_steps_of_a_long_run_are_shown_every_half_minute() -> None:
    lines = run_lines(1_000_000, 999_000, 10.0)
    assert lines[1].startswith("step 999003/")


def test_validation_is_always_shown() -> None:
    stream = io.StringIO()
    progress = LineConsole(stream)
    progress.start(100_000, 1)
    for step in range(1, 5):
        progress.update(step, VALUES | ({"val/loss": 1.5, "val-core/x/acc": 0.25} if step == 3 else {}))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/100000", "3/100000"]
    assert "val_loss 1.5000  val-core/x/acc 0.25" in lines[1]


def test_missing_and_non_finite_values_are_no_trouble() -> None:
    stream = io.StringIO()
    progress = LineConsole(stream, devices=2)
    progress.start(2, 1)
    progress.update(1, {})
    progress.update(2, {"train/loss": float("nan"), "perf/throughput": float("inf")})
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step 1/2  eta ")
    assert "loss nan  inf tok/s/device" in lines[1]


def test_a_closed_pipe_does_not_stop_the_run() -> None:
    tried: list[str] = []

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise BrokenPipeError

    progress = LineConsole(Gone())
    progress.start(2, 1)
    progress.update(1, VALUES)
    progress.update(2, VALUES)
    assert tried and "step 1/2" in tried[0], "it was written to"


def test_eta_ignores_the_resumed_part_and_the_first_step() -> None:
    timer = StepTimer(1000, done=900, now=0.0)
    assert timer.eta() == "?"
    timer.update(901, 60.0)
    assert timer.eta() == format_seconds(60 * 99)
    timer.update(902, 62.0)
    assert timer.eta() == format_seconds(2 * 98)


def test_eta_follows_the_recent_steps() -> None:
    timer = StepTimer(1000, done=0, now=0.0)
    now = 0.0
    for step in range(1, 500):
        now += 1.0 if step < 400 else 3.0
        timer.update(step, now)
    assert timer.eta() == format_seconds(3 * 501)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (32.4, "0:32"), (725, "12:05"), (97384, "27:03:04")]
)
def test_times_are_short_and_readable(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_long_wait_is_told_every_half_minute() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = LineConsole(stream, clock=clock)
    progress.waiting("responses 0 of 8, 0 scored, 0 s")  # batches ahead are begun before the first step
    progress.start(60, 3)
    for second in range(1, 71):
        clock.now = float(second)
        progress.waiting(f"responses {second} of 80, 1 scored, {second} s")
    progress.update(3, ONLINE)
    for second in range(71, 100):  # less than half a minute
        clock.now = float(second)
        progress.waiting("responses 1 of 80, 0 scored, 1 s")
    progress.waiting("")
    lines = stream.getvalue().splitlines()
    assert lines[:2] == [f"in step 3/60: responses {n} of 80, 1 scored, {n} s" for n in (30, 60)]
    assert len(lines) == 3 and lines[2].startswith("step 3/60  reward")


def test_a_bar_shows_what_it_waits_for_before_the_figures() -> None:
    stream = io.StringIO()
    console = RichConsole(
        force_terminal=True, file=stream, width=160, color_system=None, _environ={"TERM": "xterm"}
    )
    with open_console(console=console) as progress:
        progress.waiting("responses 0 of 8, 0 scored, 0 s")
        progress.start(60, 1)
        progress.update(1, VALUES)
        progress.waiting("responses 3 of 8, 1 scored, 41 s")
    assert "responses 3 of 8, 1 scored, 41 s  loss 1.2346" in stream.getvalue()
    stream.seek(0)
    stream.truncate()
    with open_console(console=console) as progress:
        progress.start(60, 1)
        progress.waiting("responses 8 of 8, 8 scored, 50 s")
        progress.waiting("")
        progress.update(1, VALUES)
    assert "scored, 50 s  loss" not in stream.getvalue()


@pytest.mark.parametrize("width", [40, 80, 140])
def test_a_terminal_shows_a_bar_and_messages_above_it(width: int) -> None:
    stream = io.StringIO()
    console = RichConsole(
        force_terminal=True, file=stream, width=width, color_system=None, _environ={"TERM": "xterm"}
    )
    with open_console(console=console) as progress:
        assert isinstance(progress, BarConsole)
        progress.start(60, 11)
        for step in range(11, 15):
            progress.update(step, VALUES | ({"val/loss": 1.5} if step == 12 else {}))
            time.sleep(0.01)
        progress.message("saved [checkpoints/step-14]")
    shown = stream.getvalue()
    assert "14/60" in shown and "loss" in shown and "eta 0:0" in shown
    assert "step 12/60  val_loss 1.5000" in shown
    assert "saved [checkpoints/step-14]" in shown, "a message is not markup"
    if width >= 80:
        assert "loss 1.2346  lr 3.0e-03  grad_norm 0.51  1,234 tok/s" in shown


def test_a_bar_that_never_started_can_be_closed() -> None:
    stream = io.StringIO()
    with open_console(
        console=RichConsole(force_terminal=True, file=stream, _environ={"TERM": "xterm"})
    ) as bar:
        bar.message("nothing to do")
    assert "nothing to do" in stream.getvalue()


def test_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    progress = open_console(console=RichConsole(file=stream))
    assert isinstance(progress, LineConsole)
    progress.message("x" * 200)
    assert stream.getvalue() == "x" * 200 + "\n", "lines in a log file are not wrapped"


def test_warnings_are_told_where_no_console_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with open_console(silent=True) as progress:
        progress.start(3, 1)
        progress.update(1, VALUES)
        progress.message("done: 3 steps")
        progress.message("warning: step 1: 3 of 8 responses got no score")
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "warning: step 1: 3 of 8 responses got no score\n")
