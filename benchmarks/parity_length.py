"""How many steps two free-running logs need for an answer, by simulation.

Pairs of rewards without a difference, and with one, go through the code that decides about real logs.
"""

from __future__ import annotations

import numpy as np
from bench import Options, show
from parity_calibration import MARGIN, Noise

from isotrain.tools.parity.compare.effects import effect_of_curves

LENGTHS = (50, 100, 200, 400, 800)
NOISES = ((0.02, 0.5), (0.02, 0.8), (0.04, 0.5), (0.04, 0.8))
"""Standard deviation of a step's reward around its trend, and its correlation with the step before."""
SHIFT = 0.10


def verdict(size: float, noise: Noise, steps: int, shift: float, random: np.random.Generator) -> str:
    a_S, b_S = size * noise.draw(random, 2, steps)
    found = effect_of_curves("reward", "reward", MARGIN, a_S, b_S - shift)
    return found.verdict


def main() -> None:
    parser = Options(__doc__, tries=5)
    parser.add_argument("--tries", type=int, default=100, help="pairs for each cell of the table")
    options = parser.read()
    random = np.random.default_rng(0)
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
