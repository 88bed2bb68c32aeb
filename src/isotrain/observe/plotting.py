"""The style and helpers of all plots."""

from __future__ import annotations

import io
import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

Array = npt.NDArray[np.float64]

SIZE_INCHES = (12.0, 7.0)
DPI = 100
INK, GREY, GRID = "#1f2933", "#616e7c", "#e4e7eb"
BLUE, ORANGE, GREEN, PURPLE, RED = "#2563eb", "#ea580c", "#0f9d6b", "#7c3aed", "#dc2626"

# From this many points on, single steps are drawn faintly and a smoothed line says where they go.
LONG = 50
# More points than this lie on the same pixels: a picture is at most half as wide.
MOST_POINTS = 4000


def new_figure(
    title: str, run: str, rows: int, size: tuple[float, float] = SIZE_INCHES
) -> tuple[Figure, list[Axes]]:
    # Made without pyplot, whose list of figures and choice of backend belong to the whole process.
    layout = ConstrainedLayoutEngine(w_pad=0.18, h_pad=0.14)
    figure = Figure(figsize=size, dpi=DPI, facecolor="white", layout=layout)
    grid = figure.subplots(rows, 1, sharex=True, squeeze=False)
    all_axes: list[Axes] = list(grid[:, 0])
    all_axes[0].set_title(plain(run), loc="right", fontsize=13, color=GREY, pad=14)
    all_axes[0].set_title(plain(title), loc="left", fontsize=17, fontweight="bold", color=INK, pad=14)
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#9aa5b1")
        axes.grid(True, color=GRID, linewidth=0.9)
        axes.set_axisbelow(True)
        axes.tick_params(colors=GREY, labelsize=11.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, steps=[1, 2, 5, 10], min_n_ticks=1))
        axes.margins(x=0.02)
    return figure, all_axes


def curve(axes: Axes, steps: Array, values: Array, colour: str, label: str, *, dashed: bool = False) -> None:
    style = "--" if dashed else "-"
    label = plain(label)
    if len(steps) >= LONG:
        window = max(5, len(steps) // 25) | 1
        axes.plot(*thinned(steps, values), color=colour, linewidth=0.9, alpha=0.28)
        smooth = thinned(steps, smooth_line(values, window))
        label = f"{label}, mean of {window:,} steps"
        axes.plot(*smooth, color=colour, linewidth=2.4, linestyle=style, label=label)
    elif len(steps):
        look: dict[str, Any] = {"color": colour, "linestyle": style, "marker": dots(steps), "markersize": 4.5}
        axes.plot(steps, values, linewidth=2.0, label=label, **look)
    broken = ~np.isfinite(values)
    if broken.any():
        # On the axis itself: such a step has no height, and must not be overlooked.
        at_the_bottom = np.full(int(broken.sum()), 0.015)
        cross: dict[str, Any] = {"marker": "x", "markersize": 8, "markeredgewidth": 2, "linestyle": ""}
        cross |= {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(steps[broken], at_the_bottom, color=RED, label=f"not finite ({broken.sum()})", **cross)


def thinned(steps: Array, values: Array) -> tuple[Array, Array]:
    """The lowest and the highest of each run of neighbouring steps, where there are too many to be seen.

    Every step would look the same and take seconds; every tenth would lose the peaks.
    """
    if len(steps) <= MOST_POINTS:
        return steps, values
    each = -(-len(steps) // (MOST_POINTS // 2))
    whole = len(steps) // each * each
    rows = np.where(np.isfinite(values[:whole]), values[:whole], math.nan).reshape(-1, each)
    start = np.arange(0, whole, each)
    # Of a row without a number any step will do: it is a gap.
    low = start + np.where(np.isnan(rows), math.inf, rows).argmin(axis=1)
    high = start + np.where(np.isnan(rows), -math.inf, rows).argmax(axis=1)
    kept = np.unique(np.concatenate([[0], low, high, np.arange(whole, len(steps)), [len(steps) - 1]]))
    return steps[kept], values[kept]


def smooth_line(values: Array, window: int) -> Array:
    """The mean over an odd number of points centred at each one; values that are not finite are left out.

    A trailing mean would lag behind and hide the end of the run. The ends, where half the points are missing,
    follow a straight line through the outermost ones: it meets the mean there and does not flatten a slope.
    """
    half = window // 2
    assert window % 2 == 1 and len(values) >= window
    finite = np.isfinite(values)
    totals = np.convolve(np.where(finite, values, 0.0), np.ones(window), mode="valid")
    counts = np.convolve(finite, np.ones(window), mode="valid")
    smooth = np.full(len(values), math.nan)
    smooth[half : len(values) - half] = np.where(counts > 0, totals / np.maximum(counts, 1), math.nan)
    index = np.arange(len(values), dtype=np.float64)
    for outermost, end in ((slice(0, window), slice(0, half)), (slice(-window, None), slice(-half, None))):
        usable = finite[outermost]
        if usable.sum() > 1:
            slope, offset = np.polyfit(index[outermost][usable], values[outermost][usable], 1)
            smooth[end] = slope * index[end] + offset
    return smooth


def dots(steps: Array) -> str:
    return "o" if len(steps) <= 30 else ""


def finish(axes: Axes, label: str, legend: Literal["best", "lower right", "below"] = "best") -> None:
    axes.set_ylabel(plain(label), fontsize=13, color=INK, labelpad=10)
    axes.set_xlabel("step", fontsize=13, color=INK, labelpad=8)
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    if legend == "below":
        # Of the figure and not of the axes: only then is room made for it.
        figure = axes.get_figure(root=True)
        assert figure is not None
        columns = 2 if 2 * max(map(len, labels)) < 80 else 1
        place: dict[str, Any] = {"loc": "outside lower center", "ncols": columns}
        figure.legend(handles, labels, frameon=False, fontsize=11, labelcolor=INK, **place)
    else:
        axes.legend(loc=legend, framealpha=0.9, edgecolor="white", fontsize=12, labelcolor=INK)


def as_png(figure: Figure, dpi: int = DPI) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=dpi)
    return png.getvalue()


def plain(text: str) -> str:
    """Text that is drawn as it is: `$` would begin a formula, and fail where it is none."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return shown.replace("$", r"\$")
