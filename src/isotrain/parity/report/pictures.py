"""A verdict's pictures as PNG.

S: steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from isotrain.language import listed, tr
from isotrain.observe.plotting import (
    BLUE,
    GREEN,
    INK,
    MOST_POINTS,
    ORANGE,
    PURPLE,
    as_png,
    curve,
    finish,
    new_figure,
)
from isotrain.parity.compare import Aligned, default_metrics
from isotrain.parity.report.evidence import Envelope, envelope
from isotrain.parity.report.facts import UNKNOWN, device_of
from isotrain.parity.report.heat_map import clipped, head, layer_maps
from isotrain.parity.run import Run
from isotrain.parity.statistics import Apart
from isotrain.parity.told import number
from isotrain.parity.verdict import Verdict

# Small enough that its letters can be read on a phone, with pixels enough for a large screen.
SIZE_INCHES = (7.6, 5.0)
DPI = 150
MOST_METRICS = 8


@dataclass(frozen=True)
class Picture:
    file: str
    """Its name in `plots/`."""
    words: str
    """What is seen, which is also its title."""
    png: bytes


def metrics_shown(verdict: Verdict) -> list[str]:
    """What was compared; where nothing could be, what both runs have."""
    comparison = verdict.comparison
    return list(comparison.curves) or default_metrics(comparison.reference, comparison.candidate)


def draw(verdict: Verdict) -> list[Picture]:
    """Curves and differences of the first metrics, then the layers."""
    return [*_of_metrics(verdict), *_of_layers(verdict)]


def _of_metrics(verdict: Verdict) -> Iterator[Picture]:
    comparison, free = verdict.comparison, verdict.outcome.pairing == "free-running"
    taken: set[str] = set()
    for metric in metrics_shown(verdict)[:MOST_METRICS]:
        name = _file_name(metric, taken)
        reference, candidate = comparison.reference, comparison.candidate
        found = comparison.curves.get(metric)
        words, figure = _overlay(metric, reference, candidate, found, free=free)
        yield Picture(f"curve-{name}.png", words, as_png(figure, DPI))
        if found is not None:
            band = envelope(verdict.level("P3"), metric)
            words, figure = _difference(metric, comparison.aligned[metric], found, band)
            yield Picture(f"difference-{name}.png", words, as_png(figure, DPI))


def _of_layers(verdict: Verdict) -> Iterator[Picture]:
    taken: set[str] = set()
    for kind, words, figure in layer_maps(verdict.level("P1")):
        yield Picture(f"layers-{_file_name(kind, taken)}.png", words, as_png(figure, DPI))


def _overlay(
    metric: str, reference: Run, candidate: Run, found: Apart | None, *, free: bool
) -> tuple[str, Figure]:
    if found is None:
        words, aside = tr("as both runs recorded it"), "these curves were not compared"
    else:
        words = _where_they_part(found, free=free)
        aside = f"{number(100 * found.mean_absolute)} hundredths apart on average, over {found.steps:,} steps"
    title = listed((clipped(metric), words), ": ")
    figure, axes = _headed(title, aside)
    for role, run, colour in (("reference", reference, BLUE), ("candidate", candidate, ORANGE)):
        series, device = run.metrics[metric], device_of(run)
        label = role if device == UNKNOWN else f"{role}: {clipped(device, 24)}"
        # Dashed above solid: where the curves agree, both are seen.
        dashed = run is not reference
        curve(axes, series.steps_S.astype(np.float64), series.values_S, colour, label, dashed=dashed)
    finish(axes, clipped(metric), legend="below")
    return title, figure


def _where_they_part(found: Apart, *, free: bool) -> str:
    if free:  # where such curves part says nothing
        return tr("each run sampled its own responses")
    if found.parts_at is None:
        return tr("the curves never part")
    return tr("the curves part at step {step:,}", step=found.parts_at)


def _difference(metric: str, aligned: Aligned, found: Apart, band: Envelope | None) -> tuple[str, Figure]:
    steps_S, error_S = aligned.steps_S.astype(np.float64), aligned.candidate_S - aligned.reference_S
    low, high = found.signed_interval.low, found.signed_interval.high
    title = listed((clipped(metric), _side(found)), ": ")
    aside = f"95 % interval of the mean: {number(low)} to {number(high)}; largest: {number(found.largest)}"
    figure, axes = _headed(title, aside)
    if band is not None:
        every = slice(None, None, -(-len(band.steps) // MOST_POINTS))
        label = f"what harmless rounding does ({band.members} runs)"
        around = (band.steps[every], band.low[every], band.high[every])
        axes.fill_between(*around, color=GREEN, alpha=0.16, linewidth=0, label=label)
    axes.axhline(0.0, color=INK, linewidth=1.1)
    curve(axes, steps_S, error_S, PURPLE, "candidate - reference")
    axes.axhspan(low, high, color=ORANGE, alpha=0.30, linewidth=0, label="mean, 95 % interval")
    if not found.largest and band is None:
        axes.set_ylim(-1.0, 1.0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=True)
    finish(axes, "difference", legend="below")
    return title, figure


def _side(found: Apart) -> str:
    if not found.largest:
        return tr("equal at every step")
    low, high = found.signed_interval.low, found.signed_interval.high
    if low <= 0 <= high:
        return tr("neither is higher on average")
    size = number(abs(found.signed_mean))
    if found.signed_mean > 0:
        return tr("the candidate is {size} higher", size=size)
    return tr("the candidate is {size} lower", size=size)


def _headed(title: str, aside: str) -> tuple[Figure, Axes]:
    figure, (axes,) = new_figure("", "", rows=1, size=SIZE_INCHES)
    head(figure, title, aside)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 5, 10], min_n_ticks=1))
    return figure, axes


def _file_name(name: str, taken: set[str]) -> str:
    base = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:60] or "metric"
    found, count = base, 1
    while found in taken:
        count += 1
        found = f"{base}-{count}"
    taken.add(found)
    return found
