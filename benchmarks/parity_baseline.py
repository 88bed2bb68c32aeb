"""Nightly jobs with a file of `isotrain parity baseline`, by simulation: false alarms a year, detection.

Rewards with a learning curve, noise from step to step and a spread between seeds. A year is one baseline of
N reruns and 365 nights that are further seeds. `red`: called different, which the options design;
`not_green`: not called equivalent, which fails a job that lets no inconclusive answer pass. Then nights with
a shift, in standard deviations of a step's noise, and nights that went wrong in whole logs, through the same
code as `parity compare`.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from bench import Options, show

from isotrain.errors import DataError
from isotrain.tools.parity.baseline import make_baseline, verdict_against
from isotrain.tools.parity.compare.effects import Reruns, effect_against_reruns, reruns_of
from isotrain.tools.parity.compare.outcome import Baseline
from isotrain.tools.parity.compare.power import wilson

Numbers = npt.NDArray[np.float64]
STEPS, NIGHTS, MARGIN = 200, 365, 0.04
NOISE = 0.02
"""Standard deviation of a step's reward."""
COURSE_S = 0.7 - 0.4 * np.exp(-np.arange(STEPS) / 60)
SEEDS = (0.1, 0.25)
"""Spread between runs of other seeds, in margins, beside what the noise of their steps makes."""
RERUNS = (3, 5, 10)
SHIFTS = (0.5, 1.0, 2.0, 4.0, 8.0)
REWARD, LENGTH, NORM, KL = "critic/rewards/mean", "response_length/mean", "actor/grad_norm", "actor/ppo_kl"
ENTROPY, SCORE = "actor/entropy", "val-core/data/reward/mean@1"
Curves = dict[str, Numbers]


def rewards(runs: int, spread: float, random: np.random.Generator) -> Numbers:
    """Half of a step's variance remembers a fifth of the step before."""
    white = random.normal(size=(runs, STEPS + 1))
    noise = NOISE * (white[:, 1:] + 0.2 * white[:, :-1]) / np.sqrt(1.04)
    curves: Numbers = COURSE_S + noise + spread * MARGIN * random.normal(size=(runs, 1))
    return curves


def years(reruns: int, spread: float, count: int, random: np.random.Generator) -> None:
    """One metric that decides. A margin of 0 shows the interval alone, without what the margin spares."""
    alarm = Baseline((), NIGHTS, 1.0).alarm(1)
    red, not_green, bare = [], [], []
    found: Counter[tuple[float, str]] = Counter()
    for _ in range(count):
        runs = rewards(reruns + NIGHTS, spread, random)
        known = reruns_of(list(runs[:reruns]))

        def verdict(run_S: Numbers, margin: float = MARGIN, known: Reruns = known) -> str:
            return effect_against_reruns("reward", "reward", margin, known, run_S, alarm).verdict

        verdicts = [verdict(run_S) for run_S in runs[reruns:]]
        red.append(verdicts.count("different"))
        not_green.append(NIGHTS - verdicts.count("equivalent"))
        bare.append(sum(verdict(run_S, 0.0) == "different" for run_S in runs[reruns:]))
        for shift in SHIFTS:
            nights = [verdict(run_S - shift * NOISE) for run_S in runs[reruns : reruns + 20]]
            for answer, number in Counter(nights).items():
                found[shift, answer] += number
    show(
        what="years",
        reruns=reruns,
        spread_in_margins=spread,
        years=count,
        red_a_year=float(np.mean(red)),
        red_interval=interval(red),
        years_with_3_or_more=float(np.mean(np.array(red) >= 3)),
        red_a_year_without_margin=float(np.mean(bare)),
        red_interval_without_margin=interval(bare),
        not_green_a_year=float(np.mean(not_green)),
        shifts={
            f"{shift:g}": {
                answer: found[shift, answer] / (20 * count)
                for answer in ("equivalent", "inconclusive", "different")
            }
            for shift in SHIFTS
        },
    )


def levels(reruns: int, count: int, random: np.random.Generator) -> None:
    """Many years of runs that differ by their level alone, with a margin of 0: nothing spares a false alarm.

    Both windows of such a run are equal, so that half of the designed alarms are to be seen.
    """
    alarm = Baseline((), NIGHTS, 1.0).alarm(1)
    red = []
    for _ in range(count):
        levels_N = random.normal(size=reruns + NIGHTS)
        known = reruns_of([np.full(4, level) for level in levels_N[:reruns]])
        _, beyond = known.reach(0.0, alarm)
        red.append(int((np.abs(levels_N[reruns:] - levels_N[:reruns].mean()) > beyond).sum()))
    show(
        what="levels",
        reruns=reruns,
        years=count,
        designed=0.5,
        red_a_year=float(np.mean(red)),
        red_interval=interval(red),
        years_without=float(np.mean(np.array(red) == 0)),
        years_with_3_or_more=float(np.mean(np.array(red) >= 3)),
    )


def interval(counts: list[int]) -> list[float]:
    """95 %, by drawing years again: nights of one year share their baseline."""
    random = np.random.default_rng(0)
    means = np.array(counts)[random.integers(len(counts), size=(2000, len(counts)))].mean(axis=1)
    return [float(f"{bound:.3g}") for bound in np.quantile(means, [0.025, 0.975])]


def curves(random: np.random.Generator) -> Curves:
    """All that a log of verl has of one run, with a tenth of a margin between seeds."""
    grow_S = np.arange(STEPS)

    def positive(level_S: Numbers | float) -> Numbers:
        return level_S * np.exp(0.1 * random.normal(size=STEPS))

    reward_S = rewards(1, 0.1, random)[0]
    return {
        REWARD: reward_S,
        LENGTH: positive(250 + 100 * (1 - np.exp(-grow_S / 80))),
        KL: positive(5e-4) + 2e-4 * random.normal(size=STEPS),
        ENTROPY: positive(0.1 + 0.5 * np.exp(-grow_S / 50)),
        NORM: positive(0.3),
        # The same rows each time: a validation varies less than a step's rewards.
        SCORE: COURSE_S + (reward_S - COURSE_S).mean() + 0.006 * random.normal(size=STEPS),
    }


def changed(name: str, change: Callable[[Numbers], Numbers]) -> Callable[[Curves], Curves]:
    return lambda curves: {**curves, name: change(curves[name])}


_GROWTH_S = np.exp(np.linspace(0, 3, STEPS))
WRONG: dict[str, Callable[[Curves], Curves]] = {
    "honest": lambda curves: curves,
    "ended early": lambda curves: {name: x_S[:120] for name, x_S in curves.items()},
    "validation 0.10 lower": changed(SCORE, lambda x_S: x_S - 0.1),
    "collapsed length": changed(LENGTH, lambda x_S: np.where(np.arange(STEPS) > 100, 0.2, 1.0) * x_S),
    "runaway KL": changed(KL, lambda x_S: x_S + 1e-3 * _GROWTH_S**2),
    "entropy collapse": changed(ENTROPY, lambda x_S: x_S / _GROWTH_S),
    "gradient norm x30": changed(NORM, lambda x_S: 30 * x_S),
    "no rewards": lambda curves: {name: x_S for name, x_S in curves.items() if name != REWARD},
    "reward 0.10 lower": changed(REWARD, lambda x_S: x_S - 0.1),
}


def write(path: Path, curves: Curves) -> Path:
    lines = []
    for step in range(1, 1 + max(map(len, curves.values()))):
        row = {name: x_S[step - 1] for name, x_S in curves.items() if name != SCORE or step % 25 == 0}
        metrics = " - ".join(f"{name}:{float(value)!r}" for name, value in row.items())
        lines.append(f"step:{step} - {metrics}")
    path.write_text("\n".join(lines) + "\n")
    return path


def whole_logs(reruns: int, baselines: int, nights: int, random: np.random.Generator) -> dict[str, object]:
    answers: dict[str, Counter[str]] = {name: Counter() for name in WRONG}
    sizes = []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for _ in range(baselines):
            logs = [write(folder / f"{number}.log", curves(random)) for number in range(reruns)]
            size, _ = make_baseline(logs, folder / "baseline.json", (), NIGHTS, 1.0)
            sizes.append(size)
            for name, change in WRONG.items():
                for _ in range(nights):
                    log = write(folder / "night.log", change(curves(random)))
                    answers[name][_answer(folder / "baseline.json", log)] += 1
    tries = baselines * nights
    green = sum(counts["equivalent"] for name, counts in answers.items() if name != "honest")
    at_most = wilson(green, tries * (len(WRONG) - 1))
    assert at_most is not None
    row = {name: dict(counts) for name, counts in answers.items()}
    result = {"reruns": reruns, "tries_each": tries, "answers": row, "green_of_wrong": green}
    return {**result, "at_most_95": at_most.high, "bytes": max(sizes)}


def _answer(baseline: Path, log: Path) -> str:
    try:
        return verdict_against(baseline, log).outcome.verdict
    except DataError:  # such as a log without any reward
        return "unreadable"


def main() -> None:
    parser = Options(__doc__, years=3, baselines=1, nights=1)
    parser.add_argument("--years", type=int, default=40, help="simulated years for each cell of the table")
    parser.add_argument("--baselines", type=int, default=3, help="baselines of whole logs")
    parser.add_argument("--nights", type=int, default=5, help="nights of each kind for each of these")
    options = parser.read()
    for reruns in RERUNS:
        levels(reruns, 50 * options.years, np.random.default_rng(1))
    random = np.random.default_rng(0)
    for reruns in RERUNS:
        for spread in SEEDS[:1] if options.quick else SEEDS:
            years(reruns, spread, options.years, random)
    for reruns in RERUNS:
        random = np.random.default_rng(reruns)
        show(what="logs", **whole_logs(reruns, options.baselines, options.nights, random))


if __name__ == "__main__":
    main()
