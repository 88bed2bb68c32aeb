"""How many steps two free-running logs need for an answer, by simulation.

Pairs of rewards without a difference, and with one, go through the code that decides about real logs. First
whole logs as they are: learning curves, plateaus, binary rewards, resumed and unequal logs; and logs that
went wrong, none of which may be equivalent.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from bench import Options, show
from parity_baseline import REWARD, WRONG, curves, write
from parity_calibration import MARGIN, Noise

from isotrain.tools.parity.compare.comparison import compare
from isotrain.tools.parity.compare.effects import effect_of_curves
from isotrain.tools.parity.compare.noise import windows_of
from isotrain.tools.parity.compare.outcome import outcome_of
from isotrain.tools.parity.compare.power import wilson
from isotrain.tools.parity.read.runs import read_run
from isotrain.tools.parity.run import RunLog, common

Numbers = npt.NDArray[np.float64]

LENGTHS = (50, 100, 200, 400, 800)
NOISES = ((0.02, 0.5), (0.02, 0.8), (0.04, 0.5), (0.04, 0.8))
"""Standard deviation of a step's reward around its trend, and its correlation with the step before."""
SHIFT = 0.10
WHOLE_LENGTHS, WHOLE_NOISE = (100, 1000, 2000), 0.03
KINDS = (
    *("learning curve", "plateau", "binary rewards"),
    *("resumed", "every second step", "last step lost"),
)


def verdict(size: float, noise: Noise, steps: int, shift: float, random: np.random.Generator) -> str:
    a_S, b_S = size * noise.draw(random, 2, steps)
    found = effect_of_curves("reward", "reward", MARGIN, a_S, b_S - shift)
    return found.verdict


def reward(kind: str, steps: int, random: np.random.Generator) -> Numbers:
    """One run's rewards. Binary ones are means of 256 responses."""
    at_S = np.arange(steps)
    risen_S = 0.3 + 0.4 * (1 - np.exp(-at_S / (0.3 * steps)))
    if kind == "plateau":
        risen_S = 0.3 + 0.6 * (1 - np.exp(-at_S / (0.05 * steps)))
    if kind == "binary rewards":
        return random.binomial(256, risen_S) / 256
    return risen_S + WHOLE_NOISE * random.normal(size=steps)


def log(path: Path, kind: str, steps: int, random: np.random.Generator, *, candidate: bool) -> Path:
    """As verl writes it, where the candidate was resumed or did not record every step."""
    reward_S = reward(kind, steps, random)
    write(path, {REWARD: reward_S})
    lines = path.read_text().splitlines()
    if candidate and kind == "resumed":
        # The attempt that was given up went a tenth further.
        given_up = write(path, {REWARD: reward(kind, steps, random)}).read_text().splitlines()
        lines = given_up[: steps * 6 // 10] + lines[steps // 2 :]
    elif candidate and kind == "every second step":
        lines = lines[1::2]
    elif candidate and kind == "last step lost":
        lines = lines[:-1]
    path.write_text("\n".join(lines) + "\n")
    return path


def known_noise(kind: str, a: RunLog, b: RunLog) -> bool:
    """Whether a test that knows the noise calls the pair equivalent: no other can do much better."""
    steps_S, (a_S, b_S) = common([run.metrics[REWARD] for run in (a, b)])
    variance = float(np.mean(a_S * (1 - a_S))) / 256 if kind == "binary rewards" else WHOLE_NOISE**2
    weights_WS = windows_of(len(steps_S)).weights_WS[[0, -1]]
    half_W = 1.96 * np.sqrt(2 * variance * (weights_WS**2).sum(axis=1))
    return bool((np.abs(weights_WS @ (b_S - a_S)) + half_W <= MARGIN).all())


def honest_logs(tries: int, quick: bool, random: np.random.Generator) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for kind in KINDS:
            for steps in WHOLE_LENGTHS[:1] if quick else WHOLE_LENGTHS:
                answers: Counter[str] = Counter()
                best = 0
                for _ in range(tries):
                    a = read_run(log(Path(directory) / "a.log", kind, steps, random, candidate=False))
                    b = read_run(log(Path(directory) / "b.log", kind, steps, random, candidate=True))
                    answers[outcome_of(compare(a, b), "free-running").verdict] += 1
                    best += known_noise(kind, a, b)
                interval = wilson(answers["equivalent"], tries)
                assert interval is not None
                row = {"logs": kind, "steps": steps, "tries": tries, "answers": dict(answers)}
                show(**row, known_noise=best, equivalent_95=[interval.low, interval.high])


def wrong_logs(tries: int, random: np.random.Generator) -> None:
    answers: dict[str, Counter[str]] = {name: Counter() for name in WRONG if name != "no rewards"}
    with tempfile.TemporaryDirectory() as directory:
        for name, counts in answers.items():
            for _ in range(tries):
                a = read_run(write(Path(directory) / "a.log", curves(random)))
                b = read_run(write(Path(directory) / "b.log", WRONG[name](curves(random))))
                counts[outcome_of(compare(a, b), "free-running").verdict] += 1
    wrong = sum(counts["equivalent"] for name, counts in answers.items() if name != "honest")
    show(logs="wrong", tries=tries, answers={k: dict(v) for k, v in answers.items()}, green_of_wrong=wrong)


def main() -> None:
    parser = Options(__doc__, tries=5, logs=3)
    parser.add_argument("--tries", type=int, default=100, help="pairs for each cell of the table")
    parser.add_argument("--logs", type=int, default=40, help="pairs of whole logs of each kind and length")
    options = parser.read()
    random = np.random.default_rng(0)
    honest_logs(options.logs, options.quick, random)
    wrong_logs(max(1, options.logs // 4), random)
    for size, memory in NOISES:
        for steps in LENGTHS[:2] if options.quick else LENGTHS:
            noise = Noise("gaussian", memory)
            equal, lower = (
                [verdict(size, noise, steps, shift, random) for _ in range(options.tries)]
                for shift in (0.0, SHIFT)
            )
            row = {"noise": size, "memory": memory, "steps": steps, "tries": options.tries}
            row |= {"equivalent": equal.count("equivalent") / len(equal)}
            row |= {"false_alarms": equal.count("different") / len(equal)}
            row |= {"lower": SHIFT, "different": lower.count("different") / len(lower)}
            row |= {"missed": lower.count("equivalent") / len(lower)}
            show(**row)


if __name__ == "__main__":
    main()
