"""A run's curves as PNG files."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from isotrain.observe.run_directory import write_atomically

Array = npt.NDArray[np.float64]

SIZE_INCHES = (12.0, 7.0)
DPI = 100
INK, GREY, GRID = "#1f2933", "#616e7c", "#e4e7eb"
BLUE, ORANGE, GREEN, PURPLE, RED = "#2563eb", "#ea580c", "#0f9d6b", "#7c3aed", "#dc2626"

# From this many points on, single steps are drawn faintly and a smoothed line says where they go.
LONG = 50


def plot_run(metrics: Sequence[Mapping[str, float]], out: Path, *, name: str | None = None) -> list[Path]:
    """Draws what the rows hold into the directory `out` and returns the files.

    `name` is the run's in the titles; by default the run directory's, of which `out` is a child.
    """
    run = name or out.resolve().parent.name
    out.mkdir(parents=True, exist_ok=True)
    figures = {
        "loss.png": _loss(metrics, run),
        "training.png": _training(metrics, run),
        "throughput.png": _throughput(metrics, run),
    }
    written = []
    for file, figure in figures.items():
        if figure is not None:
            png = io.BytesIO()
            figure.savefig(png, format="png", dpi=DPI)
            write_atomically(out / file, png.getvalue())
            written.append(out / file)
    return written


def _loss(metrics: Sequence[Mapping[str, float]], run: str) -> Figure | None:
    steps, loss = _series(metrics, "train/loss")
    val_steps, val_loss = _series(metrics, "val/loss")
    if not len(steps) and not len(val_steps):
        return None
    figure, (axes,) = _figure("Loss", run, rows=1)
    _curve(axes, steps, loss, BLUE, "training")
    if len(val_steps):
        axes.plot(
            val_steps,
            val_loss,
            color=ORANGE,
            linewidth=1.4,
            linestyle=(0, (4, 2)),
            marker="o",
            markersize=6.5,
            markeredgecolor="white",
            markeredgewidth=1.0,
            label="validation",
            zorder=5,
        )
    _finish(axes, "loss (nats per token)")
    return figure


def _training(metrics: Sequence[Mapping[str, float]], run: str) -> Figure | None:
    panels = [
        ("train/grad_norm", "gradient norm", PURPLE),
        ("train/lr", "learning rate", GREEN),
    ]
    present = [(name, label, colour) for name, label, colour in panels if len(_series(metrics, name)[0])]
    if not present:
        return None
    figure, all_axes = _figure("Optimizer", run, rows=len(present))
    for axes, (name, label, colour) in zip(all_axes, present, strict=True):
        steps, values = _series(metrics, name)
        if name == "train/lr":
            # A schedule has no noise to smooth away.
            axes.plot(steps, values, color=colour, linewidth=2.0, marker=_dots(steps), markersize=4.5)
            axes.set_ylim(bottom=0.0)
            axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=True)
        else:
            _curve(axes, steps, values, colour, label)
            if _spans_decades(values):
                axes.set_yscale("log")
        _finish(axes, label)
        axes.label_outer()
    return figure


def _throughput(metrics: Sequence[Mapping[str, float]], run: str) -> Figure | None:
    steps, values = _series(metrics, "perf/throughput")
    if not len(steps):
        return None
    figure, (axes,) = _figure("Throughput", run, rows=1)
    _curve(axes, steps, values, GREEN, "tokens per second")
    finite = values[np.isfinite(values)]
    if len(finite):
        median = float(np.median(finite))
        axes.axhline(median, color=GREY, linewidth=1.0, linestyle=(0, (2, 2)), label=f"median {median:,.0f}")
        # From zero, so that a step that looks half as fast is half as fast.
        axes.set_ylim(0.0, 1.12 * float(finite.max()) or 1.0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    _finish(axes, "tokens per second and device", legend="lower right")
    return figure


def _series(metrics: Sequence[Mapping[str, float]], name: str) -> tuple[Array, Array]:
    rows = [(row["step"], row[name]) for row in metrics if name in row]
    points = np.asarray(rows, dtype=np.float64).reshape(-1, 2)
    return points[:, 0], points[:, 1]


def _figure(title: str, run: str, rows: int) -> tuple[Figure, list[Axes]]:
    # Made without pyplot, whose list of figures and choice of backend belong to the whole process.
    layout = ConstrainedLayoutEngine(w_pad=0.18, h_pad=0.14)
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, facecolor="white", layout=layout)
    grid = figure.subplots(rows, 1, sharex=True, squeeze=False)
    all_axes: list[Axes] = list(grid[:, 0])
    all_axes[0].set_title(run, loc="right", fontsize=13, color=GREY, pad=14)
    all_axes[0].set_title(title, loc="left", fontsize=17, fontweight="bold", color=INK, pad=14)
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#9aa5b1")
        axes.grid(True, color=GRID, linewidth=0.9)
        axes.set_axisbelow(True)
        axes.tick_params(colors=GREY, labelsize=11.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, steps=[1, 2, 5, 10], min_n_ticks=1))
        axes.margins(x=0.02)
    return figure, all_axes


def _curve(axes: Axes, steps: Array, values: Array, colour: str, label: str) -> None:
    if len(steps) >= LONG:
        window = max(5, len(steps) // 25) | 1
        axes.plot(steps, values, color=colour, linewidth=0.9, alpha=0.28)
        smooth = smooth_line(values, window)
        axes.plot(steps, smooth, color=colour, linewidth=2.4, label=f"{label}, mean of {window} steps")
    elif len(steps):
        dots = _dots(steps)
        axes.plot(steps, values, color=colour, linewidth=2.0, marker=dots, markersize=4.5, label=label)
    broken = ~np.isfinite(values)
    if broken.any():
        # On the axis itself: such a step has no height, and must not be overlooked.
        at_the_bottom = np.full(int(broken.sum()), 0.015)
        axes.plot(
            steps[broken],
            at_the_bottom,
            color=RED,
            linestyle="",
            marker="x",
            markersize=8,
            markeredgewidth=2,
            label=f"not finite ({broken.sum()})",
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )


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


def _dots(steps: Array) -> str:
    return "o" if len(steps) <= 30 else ""


def _spans_decades(values: Array) -> bool:
    usable = values[np.isfinite(values)]
    return len(usable) > 1 and bool(usable.min() > 0) and bool(usable.max() > 50 * np.median(usable))


def _finish(axes: Axes, label: str, legend: Literal["best", "lower right"] = "best") -> None:
    axes.set_ylabel(label, fontsize=13, color=INK, labelpad=10)
    axes.set_xlabel("step", fontsize=13, color=INK, labelpad=8)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=legend, framealpha=0.9, edgecolor="white", fontsize=12, labelcolor=INK)
