"""Updates beside AdamW's of the run's own gradient: which of two runs is wrong, and by how much."""

from __future__ import annotations

import math

from isotrain.tools.parity.levels.updates import wrong_updates
from isotrain.tools.parity.read.layer_trace import Recomputed, Update

RIGHT = Recomputed(0.5, 2e-5, 1e-6)
GAINED = Recomputed(40.0, 1e-2, 1e-4)
FAR = Recomputed(900.0, 0.0, 1e-2)


def side(**recomputed: Recomputed) -> dict[int, Update]:
    return {1: Update((), 0.0, {}, recomputed)}


def test_right_updates_are_not_named() -> None:
    small = Recomputed(4.0, 1e-2, 1e-5)
    assert not list(wrong_updates(side(q=RIGHT, k=small), side(q=RIGHT, k=RIGHT)))


def test_names_the_run_the_parameter_and_the_size() -> None:
    (wrong,) = wrong_updates(side(q=RIGHT, k=RIGHT), side(q=RIGHT, k=GAINED))
    assert wrong.words == "the candidate's update of k at step 1 is 1.01 times AdamW's of its own gradient"
    (wrong,) = wrong_updates(side(q=FAR), side(q=RIGHT))
    assert wrong.words == (
        "the reference's update of q at step 1 is 900 roundings away from AdamW's of its own gradient"
    )


def test_another_optimizer_on_both_sides_is_no_difference() -> None:
    assert not list(wrong_updates(side(q=FAR), side(q=FAR)))


def test_no_number_is_wrong() -> None:
    (wrong,) = wrong_updates(side(q=RIGHT), side(q=Recomputed(math.inf, math.inf, math.inf)))
    assert "q at step 1" in wrong.words
