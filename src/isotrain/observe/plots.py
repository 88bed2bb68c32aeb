"""A run's curves as PNG files, and the parts that other pictures are drawn with too."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

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
    # A row without a number is a gap: any step will do.
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
        # A legend of the figure, not of the axes: only then is room made for it.
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


# A panel is its label and its curves: metric, name in the legend, colour.
Panel = tuple[str, tuple[tuple[str, str, str], ...]]
_DIVERGENCE = (
    ("actor/kl_loss", "from the reference", BLUE),
    ("actor/reward_kl_penalty", "from the reference", BLUE),
    ("actor/ppo_kl", "from the old policy", ORANGE),
)
_CLIPPED = (
    ("actor/pg_clipfrac", "fraction clipped", PURPLE),
    ("actor/pg_clipfrac_lower", "by the dual clip", ORANGE),
)
POLICY: tuple[Panel, ...] = (
    ("KL divergence (nats)", _DIVERGENCE),
    ("entropy (nats)", (("actor/entropy", "entropy", GREEN),)),
    ("tokens clipped", _CLIPPED),
)
ROLLOUT: tuple[Panel, ...] = (
    ("response tokens", (("response_length/mean", "mean", BLUE), ("response_length/max", "longest", ORANGE))),
    ("truncated responses", (("response_length/clip_ratio", "fraction", RED),)),
    ("mismatch", (("training/rollout_probs_diff_mean", "mean probability difference", PURPLE),)),
)


def _both(metric: str) -> tuple[tuple[str, str, str], ...]:
    return ((f"train/{metric}", "training", BLUE), (f"val/{metric}", "validation", ORANGE))


def _sides(metric: str) -> tuple[tuple[str, str, str], ...]:
    chosen, rejected = f"train/chosen_{metric}", f"train/rejected_{metric}"
    return ((chosen, "of chosen responses", GREEN), (rejected, "of rejected", RED))


PREFERENCE: tuple[Panel, ...] = (
    ("accuracy", _both("accuracy")),
    ("reward", _sides("reward")),
    ("standard deviation of rewards", _sides("reward_std")),
    ("F1 of wrong steps", _both("f1")),
    ("calibration error", _both("calibration_error")),
)
# In the order in which they are stacked; what a step spends on anything else is `other`. The last two come on
# top of a step's own seconds.
TIMING = {
    "gen": BLUE,
    "reward": "#38bdf8",
    "deliver": "#94a3b8",
    "reward_model": "#0e7490",
    "old_log_prob": PURPLE,
    "ref": "#c4b5fd",
    "values": "#f0abfc",
    "adv": "#be185d",
    "update_actor": ORANGE,
    "update_critic": "#fdba74",
    "update_weights": GREEN,
    "other": "#cbd2d9",
    "validate": "#a3e635",
    "save_checkpoint": "#facc15",
}
AFTER_A_STEP = ("validate", "save_checkpoint")


def plot_run(metrics: Sequence[Mapping[str, float]], out: Path, *, name: str | None = None) -> list[Path]:
    """Plot the rows into the directory `out` and return the files.

    `name` is the run's in the titles; by default the run directory's, of which `out` is a child.
    """
    run = name or out.resolve().parent.name
    out.mkdir(parents=True, exist_ok=True)
    figures = {
        "loss.png": _loss(metrics, run),
        "preference.png": _panels(metrics, run, "Preference", PREFERENCE),
        "reward.png": _reward(metrics, run),
        "policy.png": _panels(metrics, run, "Policy", POLICY),
        "rollout.png": _panels(metrics, run, "Rollout", ROLLOUT),
        "training.png": _training(metrics, run),
        "timing.png": _timing(metrics, run),
        "throughput.png": _throughput(metrics, run),
    }
    written = []
    for file, figure in figures.items():
        if figure is not None:
            write_atomically(out / file, as_png(figure))
            written.append(out / file)
    return written


def _loss(metrics: Sequence[Mapping[str, float]], run: str) -> Figure | None:
    steps, loss = _series(metrics, "train/loss")
    val_steps, val_loss = _series(metrics, "val/loss")
    if not len(steps) and not len(val_steps):
        return None
    figure, (axes,) = new_figure("Loss", run, rows=1)
    curve(axes, steps, loss, BLUE, "training")
    if len(val_steps):
        _validation(axes, val_steps, val_loss, ORANGE, "validation")
    of_tokens = any("train/loss_tokens" in row for row in metrics)
    finish(axes, "loss (nats per token)" if of_tokens else "loss")
    return figure


def _reward(metrics: Sequence[Mapping[str, float]], run: str) -> Figure | None:
    steps, reward = _series(metrics, "critic/rewards/mean")
    scored, score = _series(metrics, "critic/score/mean")
    validated = dict.fromkeys(name for row in metrics for name in row if name.startswith("val-core/"))
    rows = bool(len(steps) or len(scored)) + bool(validated)
    if not rows:
        return None
    figure, all_axes = new_figure("Reward", run, rows=rows)
    if len(steps) or len(scored):
        curve(all_axes[0], steps, reward, BLUE, "reward")
        if not np.array_equal(score, reward):
            curve(all_axes[0], scored, score, ORANGE, "score alone")
        finish(all_axes[0], "mean over a step's responses")
    for name, colour in zip(validated, cycle((ORANGE, BLUE, GREEN, PURPLE, RED)), strict=False):
        _validation(all_axes[-1], *_series(metrics, name), colour, name.removeprefix("val-core/"))
    if validated:
        finish(all_axes[-1], "validation")
    for axes in all_axes:
        axes.label_outer()
    return figure


def _panels(
    metrics: Sequence[Mapping[str, float]], run: str, title: str, panels: Sequence[Panel]
) -> Figure | None:
    names = {name for row in metrics for name in row}
    present = [panel for panel in panels if any(name in names for name, _, _ in panel[1])]
    if not present:
        return None
    figure, all_axes = new_figure(title, run, rows=len(present))
    for axes, (label, curves) in zip(all_axes, present, strict=True):
        for name, legend, colour in curves:
            if name in names:
                curve(axes, *_series(metrics, name), colour, legend)
        finish(axes, label)
        axes.label_outer()
    return figure


def _timing(metrics: Sequence[Mapping[str, float]], run: str) -> Figure | None:
    """Where the time of a step went; nothing if only whole steps were measured."""
    rows = [row for row in metrics if "timing_s/step" in row]
    if not any(f"timing_s/{part}" in row for row in rows for part in TIMING):
        return None
    seconds = {part: _seconds(rows, part) for part in TIMING}
    sampling = seconds["gen"] + seconds["reward"]
    waited = _seconds(rows, "wait_for_batch")
    # Responses that were sampled ahead cost a step only the time it waited for them.
    share = np.where((waited > 0) & (waited < sampling), waited / np.maximum(sampling, 1e-9), 1.0)
    seconds["gen"], seconds["reward"] = share * seconds["gen"], share * seconds["reward"]
    inside: Array = np.sum([seconds[part] for part in TIMING if part not in AFTER_A_STEP], axis=0)
    seconds["other"] = np.maximum(_seconds(rows, "step") - inside, 0.0)
    seconds = {part: values for part, values in seconds.items() if values.any()}
    steps = np.array([row["step"] for row in rows], dtype=np.float64)
    figure, (axes,) = new_figure("Step time", run, rows=1)
    if len(steps) >= LONG:
        colours = [TIMING[part] for part in seconds]
        axes.stackplot(steps, list(seconds.values()), colors=colours, labels=list(seconds))
    else:
        below = np.zeros(len(steps))
        for part, values in seconds.items():
            axes.bar(steps, values, bottom=below, width=0.8, color=TIMING[part], label=part)
            below = below + values
    finish(axes, "seconds")
    handles, labels = axes.get_legend_handles_labels()
    # Beside the picture, in the order in which the parts lie on each other.
    beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
    axes.legend(handles[::-1], labels[::-1], fontsize=12, labelcolor=INK, **beside)
    return figure


def _training(metrics: Sequence[Mapping[str, float]], run: str) -> Figure | None:
    panels = [
        ("train/grad_norm", "gradient norm", PURPLE),
        ("actor/grad_norm", "gradient norm", PURPLE),
        ("train/lr", "learning rate", GREEN),
        ("actor/lr", "learning rate", GREEN),
    ]
    present = [(name, label, colour) for name, label, colour in panels if len(_series(metrics, name)[0])]
    if not present:
        return None
    figure, all_axes = new_figure("Optimizer", run, rows=len(present))
    for axes, (name, label, colour) in zip(all_axes, present, strict=True):
        steps, values = _series(metrics, name)
        if name.endswith("/lr"):
            # A schedule has no noise to smooth away.
            axes.plot(steps, values, color=colour, linewidth=2.0, marker=dots(steps), markersize=4.5)
            axes.set_ylim(bottom=0.0)
            axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=True)
        else:
            curve(axes, steps, values, colour, label)
            if _spans_decades(values):
                axes.set_yscale("log")
        finish(axes, label)
        axes.label_outer()
    return figure


def _throughput(metrics: Sequence[Mapping[str, float]], run: str) -> Figure | None:
    steps, values = _series(metrics, "perf/throughput")
    if not len(steps):
        return None
    figure, (axes,) = new_figure("Throughput", run, rows=1)
    curve(axes, steps, values, GREEN, "tokens per second")
    finite = values[np.isfinite(values)]
    if len(finite):
        median = float(np.median(finite))
        axes.axhline(median, color=GREY, linewidth=1.0, linestyle=(0, (2, 2)), label=f"median {median:,.0f}")
        # From zero, so that a step that looks half as fast is half as fast.
        axes.set_ylim(0.0, 1.12 * float(finite.max()) or 1.0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    finish(axes, "tokens per second and device", legend="lower right")
    return figure


def _seconds(rows: Sequence[Mapping[str, float]], part: str) -> Array:
    """Seconds of each row; 0 where it was not measured."""
    values = np.array([row.get(f"timing_s/{part}", 0.0) for row in rows], dtype=np.float64)
    return np.where(np.isfinite(values), values, 0.0)


def _series(metrics: Sequence[Mapping[str, float]], name: str) -> tuple[Array, Array]:
    rows = [(row["step"], row[name]) for row in metrics if name in row]
    points = np.asarray(rows, dtype=np.float64).reshape(-1, 2)
    return points[:, 0], points[:, 1]


def _validation(axes: Axes, steps: Array, values: Array, colour: str, label: str) -> None:
    line: dict[str, Any] = {"color": colour, "linewidth": 1.4, "linestyle": (0, (4, 2)), "zorder": 5}
    line |= {"marker": "o", "markersize": 6.5, "markeredgecolor": "white", "markeredgewidth": 1.0}
    axes.plot(steps, values, label=plain(label), **line)


def _spans_decades(values: Array) -> bool:
    usable = values[np.isfinite(values)]
    return len(usable) > 1 and bool(usable.min() > 0) and bool(usable.max() > 50 * np.median(usable))
