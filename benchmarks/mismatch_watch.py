"""What the metrics of the mismatch and their watch cost of a GRPO step.

The same trajectories are trained on twice, with the metrics and the watch and without them, in turns. `ratio`
is the processor time that their own code takes over that of a step with sampling; lower is better.
`difference` is the difference of both sides over the same: it has the noise of two whole updates in it. The
model is the tiny one, whose steps are the cheapest: with any other the share is smaller.

    python benchmarks/mismatch_watch.py [--pairs 30]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench
from tiny_grpo import TinyGrpo, tiny_grpo

from isotrain.algorithms.mismatch import NOT_MEASURED, combine, mismatch
from isotrain.data.prepare.tiny import make_tiny
from isotrain.observe.mismatch_watch import METRIC, MismatchWatch

GOAL = 0.01
TRAINER = "isotrain.trainers.online"
WARM_UP = 2


@contextmanager
def clocked(seconds: list[float]) -> Iterator[None]:
    """Add up what the ranks' part takes."""

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*arguments)
            finally:
                seconds.append(time.process_time() - begin)

        return call

    with (
        patch(f"{TRAINER}.step.mismatch", timed(mismatch)),
        patch(f"{TRAINER}.policy_rank.mismatches.combine", timed(combine)),
    ):
        yield


def update(run: TinyGrpo, written: Any, scores: Any, watch: MismatchWatch | None) -> tuple[float, float]:
    """Processor seconds of an update, and of the metrics and the watch in it."""
    run.load(written)
    own: list[float] = []
    begin = time.process_time()
    if watch is None:
        with (
            patch(f"{TRAINER}.step.mismatch", lambda *_: NOT_MEASURED),
            patch(f"{TRAINER}.policy_rank.mismatches.combine", lambda _: NOT_MEASURED),
        ):
            run.learn(scores)
        return time.process_time() - begin, 0.0
    with clocked(own):
        report = run.learn(scores)
    inside = time.process_time()
    watch.observe(run.step, combine([report.mismatch]).metrics()[METRIC])
    end = time.process_time()
    return end - begin, sum(own) + end - inside


def main() -> None:
    parser = bench.Options(__doc__, pairs=4)
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.read()
    shares, differences, steps, owns = [], [], [], []
    with tempfile.TemporaryDirectory() as directory:
        tiny = Path(directory)
        make_tiny(tiny, train_rows=64, validation_rows=8)
        with tiny_grpo(tiny) as run:
            watch = MismatchWatch()
            for number in range(WARM_UP + options.pairs):
                begin = time.process_time()
                written, scores = run.sample()
                sampled = time.process_time() - begin
                sides = [watch, None] if number % 2 else [None, watch]
                told = {side is watch: update(run, written, scores, side) for side in sides}
                run.send()
                if number < WARM_UP:
                    continue
                step_s = sampled + told[True][0]
                steps.append(step_s)
                owns.append(told[True][1])
                shares.append(told[True][1] / step_s)
                differences.append((told[True][0] - told[False][0]) / step_s)
                ratios = bench.spread(shares)
                bench.report(
                    "mismatch_watch",
                    ratios["median"],
                    goal=GOAL,
                    met=ratios["median"] <= GOAL,
                    ratios=ratios,
                    difference=bench.spread(differences),
                    own_s=bench.spread(owns),
                    step_s=bench.spread(steps),
                )


if __name__ == "__main__":
    main()
