"""Whether an optimizer makes AdamW's update of the gradient that it is given, by each run alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from isotrain.language import tr
from isotrain.tools.parity.read.layer_trace import Recomputed, Update
from isotrain.tools.parity.run import ROLES

# In roundings of the new weights. Honest kernels were at most at 3.1: they round the decayed weight as well.
LARGEST = 8.0
# A factor is told beyond this, and beyond its standard error.
_FACTOR, _SURE = 1e-3, 4.0


@dataclass(frozen=True)
class WrongUpdate:
    step: int
    name: str
    role: str
    recomputed: Recomputed

    @property
    def words(self) -> str:
        gain = self.recomputed.gain
        place = {"role": ROLES[self.role], "name": self.name, "step": self.step}
        if not max(_FACTOR, _SURE * self.recomputed.gain_error) < abs(gain) < math.inf:
            return tr(
                "the {role}'s update of {name} at step {step} is {units:.3g} roundings away from AdamW's of "
                "its own gradient",
                units=self.recomputed.units,
                **place,
            )
        return tr(
            "the {role}'s update of {name} at step {step} is {factor:.5g} times AdamW's of its own gradient",
            factor=1 + gain,
            **place,
        )


def wrong_updates(reference: Mapping[int, Update], candidate: Mapping[int, Update]) -> Iterator[WrongUpdate]:
    """Those of one run; what is off in both alike is another optimizer, and no difference."""
    sides = {"reference": reference, "candidate": candidate}
    off = {
        role: {
            (step, name): WrongUpdate(step, name, role, recomputed)
            for step, update in side.items()
            for name, recomputed in update.recomputed.items()
            if recomputed.units > LARGEST
        }
        for role, side in sides.items()
    }
    for role, other in (("candidate", "reference"), ("reference", "candidate")):
        yield from (wrong for key, wrong in off[role].items() if key not in off[other])
