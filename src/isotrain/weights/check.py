"""The weight check: do an engine's log-probs of fixed prompts move as those of the trained model do?

It finds weights that are whole but wrong: an update that was skipped, exchanged tensors, a model that both
sides understand differently. Tensors that an update leaves out are found before, in the engine
(`transport.py`): one small update moves log-probs by far less than rounding.

T: tokens of all prompts, each from its second on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isotrain.data.encode import Prompt
from isotrain.data.pictures import Picture
from isotrain.data.store import SampleStore

Logps = npt.NDArray[np.float32]

# The mean over so many tokens is steady, and a device reads them in one step.
CHECK_TOKENS = 256
# How many of the first prompts they are taken from.
CHECK_PROMPTS = 16


@dataclass(frozen=True)
class Tolerance:
    """How far log-probs may differ, in the mean.

    Rounding differs from model to model, so that the first update of a run says how large it is. It grows
    with the distance that a model has gone since then, and with nothing else: what is allowed never follows
    from differences that were accepted before.
    """

    first: float
    """At the first update."""
    later: float
    """After it, or three times what was found at it if that is more."""
    share: float = 0.0
    """The part of the trained model's movement since the first update that comes on top."""

    @classmethod
    def fixed(cls, limit: float) -> Tolerance:
        """One limit for all updates: the user's."""
        return cls(limit, limit)

    def allowed(self, start: float, moved: float) -> float:
        """`start`: the difference at the first update, `moved`: mean distance of the trained model since."""
        return min(self.first, max(self.later, 3 * start)) + self.share * moved


TOLERANCE = {
    "float32": Tolerance(1e-3, 1e-4, 0.01),
    "float16": Tolerance(0.04, 0.0025, 0.02),  # three more digits than bfloat16 has, in base 2
    "bfloat16": Tolerance(0.3, 0.02, 0.05),
}


def mean_difference(logp_T: Logps, trained_T: Logps) -> float:
    return float(np.abs(logp_T - trained_T).mean())


class WeightCheck:
    """Remembers the first update of each engine."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self._first: dict[int, tuple[int, float, Logps]] = {}

    def problem(self, engine: int, version: int, logp_T: Logps, trained_T: Logps) -> str:
        """The problem with an engine's log-probs after an update; empty if they are as they should be."""
        difference = mean_difference(logp_T, trained_T)
        allowed, since = self.tolerance.first, ""
        if engine in self._first:
            first_version, start, trained_first_T = self._first[engine]
            moved = mean_difference(trained_T, trained_first_T)
            allowed = self.tolerance.allowed(start, moved)
            since = (
                f": it was {start:.3g} at weight update {first_version}, and the trained model has moved by "
                f"{moved:.3g} since then"
            )
        if difference <= allowed:
            self._first.setdefault(engine, (version, difference, trained_T))
            return ""
        return (
            f"its log-probs of {len(trained_T)} tokens differ from the trained model by {difference:.3g} on "
            f"average; {allowed:.3g} is allowed{since} (rollout.weight_check_tolerance). It does not compute "
            "what the trained model does; rollout.engine: hf shows whether the engine is the reason"
        )


def check_prompts(store: SampleStore[Prompt]) -> list[npt.NDArray[np.int32]]:
    """The first prompts, cut at `CHECK_TOKENS`; a single token is repeated: log-probs need a second.

    The first picture stays whole, with a token after it: a tower that is stale would pass unseen.
    """
    prompts: list[npt.NDArray[np.int32]] = []
    room, seen = CHECK_TOKENS, False
    for number in range(min(len(store), CHECK_PROMPTS)):
        prompt = store[number]
        if not seen and prompt.pictures:
            room, seen = max(room, prompt.pictures[0].stop + 1), True
        prompt_P = prompt.tokens_P[:room]
        prompts.append(np.resize(prompt_P, max(2, len(prompt_P))))
        room -= len(prompts[-1])
        if room < 2:
            break
    return prompts


def check_pictures(
    prompts: Sequence[npt.NDArray[np.int32]], pictures: Callable[[int], tuple[Picture, ...]]
) -> list[tuple[Picture, ...]]:
    """The pictures that are whole in each prompt of `check_prompts`; `pictures` are those of a row."""
    return [
        tuple(picture for picture in pictures(row) if picture.stop <= len(prompt_P))
        for row, prompt_P in enumerate(prompts)
    ]
