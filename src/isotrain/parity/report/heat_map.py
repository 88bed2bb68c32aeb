"""Forced steps as pictures: how far each layer is from its limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from isotrain.language import tr
from isotrain.observe.plotting import GREY, INK, Array, new_figure, plain
from isotrain.parity.levels import Level
from isotrain.parity.report.evidence import Layer, first_layer, layers

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


def layer_maps(level: Level) -> Iterator[tuple[str, str, Figure]]:
    """Kind, words and picture of each kind of tensor that was compared."""
    found, first = layers(level), first_layer(level)
    for kind in list(dict.fromkeys(layer.kind for layer in found))[:MOST_KINDS]:
        of_kind = [layer for layer in found if layer.kind == kind]
        words = _words(kind, of_kind)
        yield kind, words, _map(words, of_kind, first if first and first.kind == kind else None)


def _words(kind: str, found: Sequence[Layer]) -> str:
    past = [layer for layer in found if layer.decades > 0]
    what = _PLURALS.get(kind, clipped(kind))
    if not past:
        count = len({layer.name for layer in found})
        if count == 1:
            return tr("{what}: the only one is within the limit", what=what)
        return tr("{what}: all {count:,} are within the limit", what=what, count=count)
    return tr("{what}: {name} is past its limit", what=what, name=clipped(past[0].name))


def _map(words: str, found: Sequence[Layer], first: Layer | None) -> Figure:
    names = list(dict.fromkeys(layer.name for layer in found))
    steps = sorted({layer.step for layer in found})
    rows, columns = _groups(len(names), MOST_ROWS), _groups(len(steps), MOST_COLUMNS)
    row_of = {names[index]: row for row, group in enumerate(rows) for index in group}
    column_of = {steps[index]: column for column, group in enumerate(columns) for index in group}
    decades_RC = np.full((len(rows), len(columns)), math.nan)
    worst: dict[tuple[int, int], Layer] = {}
    for layer in found:
        cell = row_of[layer.name], column_of[layer.step]
        if cell not in worst or layer.decades > worst[cell].decades:
            worst[cell] = layer
            decades_RC[cell] = np.clip(layer.decades, -_DECADES, _DECADES)
    figure, (axes,) = new_figure("", "", rows=1, size=(7.6, 2.3 + 0.25 * max(4, len(rows))))
    past = sum(layer.decades > 0 for layer in found)
    head(figure, words, f"{past:,} of {len(found):,} comparisons are past their limit; in order of execution")
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


def _figures(axes: Axes, worst: dict[tuple[int, int], Layer]) -> None:
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


_LONGEST_NAME = 30
_HEIGHT_INCHES = 0.78


def head(figure: Figure, title: str, aside: str) -> None:
    """What is seen, and below it in grey the figures; they take the whole width, axes may be narrow."""
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
