"""False alarms and power of every statistical decision of `isotrain parity`, by simulation.

Pairs without any difference, of every length, tail and autocorrelation, go through the code that decides
about real logs: how often are they called different, where 1 % was designed? Then pairs with a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from bench import Options, show
from scipy.signal import lfilter

from isotrain.tools.parity.compare.effects import effect_of_curves, effect_of_runs
from isotrain.tools.parity.compare.power import wilson
from isotrain.tools.parity.levels.envelope import calibrated, distances

Numbers = npt.NDArray[np.float64]
LENGTHS = (60, 200, 1000, 5000)
MEMORIES = (0.0, 0.5, 0.8, 0.9, 0.95)
TAILS = ("gaussian", "t3", "spikes")
# In units of the margin: noise that the margin does not hide.
NOISE, MARGIN = 1.0, 0.04
MEMBERS = (3, 6, 8)


@dataclass(frozen=True)
class Noise:
    tail: str
    memory: float

    def draw(self, random: np.random.Generator, runs: int, steps: int) -> Numbers:
        """Of size 1, with `memory` from step to step; spikes are 8 times as large, at 2 % of the steps."""
        shape = (runs, steps + 400)
        fresh = random.standard_t(3, shape) / np.sqrt(3) if self.tail == "t3" else random.normal(size=shape)
        slow: Numbers = lfilter([1.0], [1.0, -self.memory], fresh, axis=1)[:, 400:]
        slow = slow * np.sqrt(1 - self.memory**2)
        if self.tail == "spikes":
            slow = slow + (random.random(slow.shape) < 0.02) * 8 * random.normal(size=slow.shape)
        return slow


def one_run_a_side(noise: Noise, steps: int, random: np.random.Generator, shift: float = 0.0) -> bool:
    a_S, b_S = MARGIN * NOISE * noise.draw(random, 2, steps)
    found = effect_of_curves("reward", "reward", MARGIN, a_S, b_S + shift)
    return found.verdict == "different"


def paired_curves(noise: Noise, steps: int, random: np.random.Generator, shift: float = 0.0) -> bool:
    """The signed test of P2: a margin of 0 leaves the noise model alone."""
    a_S = 2 + 0.1 * random.normal(size=steps)
    b_S = a_S + 5e-4 * noise.draw(random, 1, steps)[0] + shift
    found = effect_of_curves("loss", "loss", 0.0, a_S, b_S)
    return found.verdict == "different"


def an_envelope(members: int, metrics: int) -> Callable[..., bool]:
    def outside(noise: Noise, steps: int, random: np.random.Generator, shift: float = 0.0) -> bool:
        candidate, own = [], []
        for metric in range(metrics):
            runs_NS = noise.draw(random, members + 2, steps)
            values_S = runs_NS[0] + (shift if metric == 0 else 0.0)
            candidate.append(distances(values_S, runs_NS[1:]).statistics_T)
            own.append(
                np.stack(
                    [
                        distances(runs_NS[n], np.delete(runs_NS[1:], n - 1, axis=0)).statistics_T
                        for n in range(1, members + 2)
                    ]
                )
            )
        rated = calibrated(np.concatenate(candidate), np.concatenate(own, axis=1))
        return bool(rated.ratio_T.max() > rated.limit)

    return outside


def seeds(count: int) -> Callable[..., bool]:
    def differ(noise: Noise, steps: int, random: np.random.Generator, shift: float = 0.0) -> bool:
        """Runs of both sides whose levels vary from seed to seed as much as the margin."""
        levels = MARGIN * random.normal(size=2 * count)
        runs = MARGIN * noise.draw(random, 2 * count, steps) + levels[:, None]
        a, b = list(runs[:count]), list(runs[count:] + shift)
        found = effect_of_runs("reward", "reward", MARGIN, a, b, paired=False)
        return found.verdict == "different"

    return differ


DECISIONS: dict[str, Callable[..., bool]] = {
    "one run a side": one_run_a_side,
    "paired, signed": paired_curves,
    **{f"envelope of {m}, {k} metrics": an_envelope(m, k) for m in MEMBERS for k in (1, 5)},
    "5 seeds a side": seeds(5),
}
# A difference in the unit of the decision's own noise that it should see at 200 steps.
SHIFTS = {"one run a side": 0.1, "paired, signed": 2e-3, "5 seeds a side": 0.3}


def cells(quick: bool) -> Iterator[tuple[str, int, Noise]]:
    for name in DECISIONS:
        for steps in LENGTHS[:2] if quick else LENGTHS:
            for tail in TAILS:
                # Between runs nothing is estimated from the steps: the ends of the range are enough.
                few = quick or not name.startswith(("one run", "paired"))
                for memory in (0.0, 0.95) if few else MEMORIES:
                    yield name, steps, Noise(tail, memory)


def main() -> None:
    parser = Options(__doc__, tries=40)
    parser.add_argument("--tries", type=int, default=400, help="pairs for each cell of the table")
    parser.add_argument("--only", default="", help="decisions whose name contains this")
    options = parser.read()
    random = np.random.default_rng(0)
    worst: dict[str, float] = {}
    for name, steps, noise in cells(options.quick):
        if options.only not in name:
            continue
        tries = max(20, options.tries // 4) if steps == 5000 else options.tries
        alarms = sum(DECISIONS[name](noise, steps, random) for _ in range(tries))
        interval = wilson(alarms, tries)
        assert interval is not None
        row = {"decision": name, "steps": steps, "tail": noise.tail, "memory": noise.memory}
        row |= {"tries": tries, "false_alarms": alarms / tries, "at_most_95": interval.high}
        if steps == 200 and noise.tail == "gaussian":
            shift = SHIFTS.get(name, 4.0)
            row["shift"] = shift
            found = sum(DECISIONS[name](noise, steps, random, shift) for _ in range(tries // 2))
            row["power"] = found / (tries // 2)
        worst[name] = max(worst.get(name, 0.0), alarms / tries)
        show(**row)
    show(name="parity_calibration", designed=0.01, tries=options.tries, worst=worst)


if __name__ == "__main__":
    main()
