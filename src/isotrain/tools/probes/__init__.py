"""Probes of a training engine, for `isotrain parity`: what `observe` in a recipe asks for."""

from __future__ import annotations

from isotrain.engine.engine import Probe
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.schema import Recipe
from isotrain.tools.probes.layer_trace import LayerTrace
from isotrain.tools.probes.operator_errors import FirstUpdateOperators
from isotrain.tools.probes.score_tests.recorder import ScoreTestRecorder
from isotrain.tools.probes.truth import TruthTrace


def make_probes(recipe: Recipe, done: int) -> list[Probe]:
    """The probes of a run that has taken `done` steps; `ObserveSection.probes` names this function."""
    observe, run, probes = recipe.observe, RunDirectory(recipe.output), list[Probe]()
    if observe.truth:
        return [TruthTrace(run.layer_trace, after=done)]
    if observe.layer_trace:
        probes += [
            LayerTrace(run.layer_trace, observe.layer_trace, after=done),
            ScoreTestRecorder(run.score_tests),
        ]
    if observe.operators:
        probes.append(FirstUpdateOperators(run.layer_trace, recipe.model.dtype))
    return probes
