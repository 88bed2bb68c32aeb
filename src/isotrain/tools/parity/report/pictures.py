"""A verdict's pictures as PNG: curves, and how far each layer of the forced steps is from its limit.

S: steps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from isotrain.language import listed, tr
from isotrain.observe.plots import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MOST_POINTS,
    ORANGE,
    PURPLE,
    Array,
    as_png,
    curve,
    finish,
    new_figure,
    plain,
)
from isotrain.tools.parity.compare.comparison import Aligned, default_metrics
from isotrain.tools.parity.compare.effects import Effect, WindowEffect
from isotrain.tools.parity.compare.statistics import Apart
from isotrain.tools.parity.levels.level import Level
from isotrain.tools.parity.report.evidence import Envelope, LayerErrors, envelope, first_layer, layers
from isotrain.tools.parity.report.facts import UNKNOWN, device_of
from isotrain.tools.parity.report.text import interval, number
from isotrain.tools.parity.run import RunLog
from isotrain.tools.parity.verdict import Verdict

MOST_ROWS, MOST_COLUMNS, MOST_KINDS = 44, 16, 6
# So many cells have room for their figure.
_MOST_FIGURES, _COLUMNS_WITH_FIGURES = 200, 5
_DECADES = 3.0
_TICKS = {-3: "1/1000", -2: "1/100", -1: "1/10", 0: "limit", 1: "10 ×", 2: "100 ×", 3: "1000 ×"}
_PLURALS = {"activation": tr("Activations"), "gradient": tr("Gradients"), "update": tr("Updates")}
# The colour jumps at the limit: what is past it is seen at once, however little it is.
_COLOURS = LinearSegmentedColormap.from_list(
    "limit", [(0.0, "#eefaf5"), (0.4999, "#6cc5a1"), (0.5, "#fdba74"), (0.65, "#ea580c"), (1.0, "#991b1b")]
).with_extremes(bad="#e4e7eb")

_LONGEST_NAME = 30
_HEIGHT_INCHES = 0.78
# Small enough that its letters can be read on a phone, with pixels enough for a large screen.
SIZE_INCHES = (7.6, 5.0)
DPI = 150
MOST_METRICS = 8


def layer_maps(level: Level) -> Iterator[tuple[str, str, Figure]]:
    """Kind, words and picture of each kind of tensor that was compared."""
    compared, first = layers(level), first_layer(level)
    for kind in list(dict.fromkeys(layer.kind for layer in compared))[:MOST_KINDS]:
        of_kind = [layer for layer in compared if layer.kind == kind]
        words = _words(kind, of_kind)
        yield kind, words, _map(words, of_kind, first if first and first.kind == kind else None)


def _words(kind: str, compared: Sequence[LayerErrors]) -> str:
    past = [layer for layer in compared if layer.decades > 0]
    what = _PLURALS.get(kind, clipped(kind))
    if not past:
        count = len({layer.name for layer in compared})
        if count == 1:
            return tr("{what}: the only one is within the limit", what=what)
        return tr("{what}: all {count:,} are within the limit", what=what, count=count)
    return tr("{what}: {name} is past its limit", what=what, name=clipped(past[0].name))


def _map(words: str, compared: Sequence[LayerErrors], first: LayerErrors | None) -> Figure:
    names = list(dict.fromkeys(layer.name for layer in compared))
    steps = sorted({layer.step for layer in compared})
    rows, columns = _groups(len(names), MOST_ROWS), _groups(len(steps), MOST_COLUMNS)
    row_of = {names[index]: row for row, group in enumerate(rows) for index in group}
    column_of = {steps[index]: column for column, group in enumerate(columns) for index in group}
    decades_RC = np.full((len(rows), len(columns)), math.nan)
    worst: dict[tuple[int, int], LayerErrors] = {}
    for layer in compared:
        cell = row_of[layer.name], column_of[layer.step]
        if cell not in worst or layer.decades > worst[cell].decades:
            worst[cell] = layer
            decades_RC[cell] = np.clip(layer.decades, -_DECADES, _DECADES)
    figure, (axes,) = new_figure("", "", rows=1, size=(7.6, 2.3 + 0.25 * max(4, len(rows))))
    past = sum(layer.decades > 0 for layer in compared)
    head(
        figure,
        words,
        f"{past:,} of {len(compared):,} comparisons are past their limit; in order of execution",
    )
    _cells(figure, axes, decades_RC)
    axes.set_yticks(range(len(rows)), [_label([names[i] for i in group]) for group in rows], fontsize=9.5)
    axes.set_xticks(range(len(columns)), [_label([str(steps[i]) for i in group]) for group in columns])
    axes.set_xlabel("forced step", fontsize=12, color=INK)
    if len(worst) <= _MOST_FIGURES and len(columns) <= _COLUMNS_WITH_FIGURES:
        _figures(axes, worst)
    if first is not None:
        row, column = row_of[first.name], column_of[first.step]
        corner = (column - 0.5, row - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=INK, linewidth=2.5, zorder=6))
    return figure


def _cells(figure: Figure, axes: Axes, decades_RC: Array) -> None:
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    image = axes.imshow(decades_RC, cmap=_COLOURS, vmin=-_DECADES, vmax=_DECADES, aspect="auto")
    bar = figure.colorbar(image, ax=axes, ticks=list(_TICKS), fraction=0.045, pad=0.02)
    bar.ax.set_yticklabels(list(_TICKS.values()), fontsize=9.5, color=GREY)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)


def _figures(axes: Axes, worst: dict[tuple[int, int], LayerErrors]) -> None:
    for (row, column), layer in worst.items():
        colour = "white" if layer.decades > 1 else INK
        text = f"{layer.error:.1e}" if math.isfinite(layer.error) else "not finite"
        axes.text(column, row, text, ha="center", va="center", fontsize=9, color=colour, zorder=5)


def _groups(count: int, most: int) -> list[range]:
    """Neighbours share a cell, which shows the worst of them, where there are too many."""
    each = -(-count // most)
    return [range(start, min(start + each, count)) for start in range(0, count, each)]


def _label(names: Sequence[str]) -> str:
    more = f" (+{len(names) - 1})" if len(names) > 1 else ""
    return plain(clipped(names[0])) + more


def head(figure: Figure, title: str, aside: str) -> None:
    """A title, with figures in grey below it; they take the whole width, axes may be narrow."""
    height = figure.get_figheight()
    layout = figure.get_layout_engine()
    assert layout is not None
    layout.set(rect=(0.0, 0.0, 1.0, 1 - _HEIGHT_INCHES / height))  # type: ignore[call-arg]
    figure.text(0.025, 1 - 0.2 / height, plain(title), fontsize=14, fontweight="bold", color=INK, va="top")
    figure.text(0.025, 1 - 0.52 / height, plain(aside), fontsize=11.5, color=GREY, va="top")


def clipped(name: str, longest: int = _LONGEST_NAME) -> str:
    """A name without its middle: what tells names apart is at their ends."""
    if len(name) <= longest:
        return name
    return f"{name[: longest // 2 - 1]}…{name[-(longest // 2) :]}"


@dataclass(frozen=True)
class Picture:
    file: str
    """Its name in `plots/`."""
    words: str
    """The finding, which is also its title."""
    png: bytes


def metrics_shown(verdict: Verdict) -> list[str]:
    """Compared metrics; where there are none, those that both runs have."""
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
        apart = comparison.curves.get(metric)
        words, figure = _overlay(metric, reference, candidate, apart, free=free)
        yield Picture(f"curve-{name}.png", words, as_png(figure, DPI))
        if apart is not None:
            band = envelope(verdict.level("P3"), metric)
            effect = next(one for one in verdict.outcome.effects if one.metric == metric)
            words, figure = _difference(comparison.aligned[metric], apart, effect, band)
            yield Picture(f"difference-{name}.png", words, as_png(figure, DPI))


def _of_layers(verdict: Verdict) -> Iterator[Picture]:
    taken: set[str] = set()
    for kind, words, figure in layer_maps(verdict.level("P1")):
        yield Picture(f"layers-{_file_name(kind, taken)}.png", words, as_png(figure, DPI))


def _overlay(
    metric: str, reference: RunLog, candidate: RunLog, apart: Apart | None, *, free: bool
) -> tuple[str, Figure]:
    if apart is None:
        words, aside = tr("as both runs recorded it"), "these curves were not compared"
    else:
        words = _where_they_part(apart, free=free)
        aside = f"{number(100 * apart.mean_absolute)} hundredths apart on average, over {apart.steps:,} steps"
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


def _where_they_part(apart: Apart, *, free: bool) -> str:
    if free:  # where such curves part says nothing
        return tr("each run sampled its own responses")
    if apart.parts_at is None:
        return tr("the curves never part")
    return tr("the curves part at step {step:,}", step=apart.parts_at)


def _difference(aligned: Aligned, apart: Apart, effect: Effect, band: Envelope | None) -> tuple[str, Figure]:
    mean = effect.windows[0]
    steps_S, error_S = aligned.steps_S.astype(np.float64), aligned.candidate_S - aligned.reference_S
    title = listed((clipped(effect.metric), _side(apart, mean)), ": ")
    aside = f"95 % interval of the mean: {interval(mean.interval)}; largest: {number(apart.largest)}"
    figure, axes = _headed(title, aside)
    if band is not None:
        every = slice(None, None, -(-len(band.steps) // MOST_POINTS))
        label = f"what harmless rounding does ({band.members} runs)"
        around = (band.steps[every], band.low[every], band.high[every])
        axes.fill_between(*around, color=GREEN, alpha=0.16, linewidth=0, label=label)
    axes.axhline(0.0, color=INK, linewidth=1.1)
    curve(axes, steps_S, error_S, PURPLE, "candidate - reference")
    if mean.interval is not None:
        low, high = mean.interval.low, mean.interval.high
        axes.axhspan(low, high, color=ORANGE, alpha=0.30, linewidth=0, label="mean, 95 % interval")
    axes.axhline(effect.margin, color=GREY, linewidth=1.4, linestyle="--", label=f"margin, {effect.margin:g}")
    axes.axhline(-effect.margin, color=GREY, linewidth=1.4, linestyle="--")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=True)
    finish(axes, "difference", legend="below")
    return title, figure


def _side(apart: Apart, mean: WindowEffect) -> str:
    if not apart.largest:
        return tr("equal at every step")
    if mean.interval is None or mean.interval.low <= 0 <= mean.interval.high:
        return tr("neither is higher on average")
    size = number(abs(mean.difference))
    if mean.difference > 0:
        return tr("the candidate is {size} higher", size=size)
    return tr("the candidate is {size} lower", size=size)


def _headed(title: str, aside: str) -> tuple[Figure, Axes]:
    figure, (axes,) = new_figure("", "", rows=1, size=SIZE_INCHES)
    head(figure, title, aside)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 5, 10], min_n_ticks=1))
    return figure, axes


def _file_name(name: str, taken: set[str]) -> str:
    base = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:60] or "metric"
    candidate, count = base, 1
    while candidate in taken:
        count += 1
        candidate = f"{base}-{count}"
    taken.add(candidate)
    return candidate
