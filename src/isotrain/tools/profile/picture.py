"""The timeline of a run's profiled steps as a picture: a line for each worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import AutoLocator

from isotrain.observe.plots import GREY, INK, RED, SIZE_INCHES, TIMING, as_png, new_figure, plain
from isotrain.observe.run_directory import write_atomically
from isotrain.observe.spans import STEP, Span

# More lines than this cannot be read.
MOST_STEPS, MOST_WORKERS = 3, 16
_SAME_AS = {
    "generate": "gen",
    "save": "save_checkpoint",
    "write_checkpoint": "save_checkpoint",
    "load": "deliver",
    "send_weights": "update_weights",
    "receive_weights": "update_weights",
    "update": "update_actor",
}
_MORE = {
    "wait_for_batch": "#e4e7eb",
    "learn": "#fed7aa",
    "data": "#38bdf8",
    "weight_check": "#86efac",
    "record": "#475569",
}


def draw(steps: Mapping[int, Sequence[Span]], run: str, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, as_png(_figure(dict(list(steps.items())[:MOST_STEPS]), run)))


def _figure(steps: Mapping[int, Sequence[Span]], run: str) -> Figure:
    figure, all_axes = new_figure("Who does what when", run, rows=len(steps), size=_size(steps))
    used: dict[str, str] = {}
    for axes, (step, spans) in zip(all_axes, steps.items(), strict=True):
        whole = next(span for span in spans if span.name == STEP)
        workers = sorted({span.worker for span in spans}, key=_order)
        for line, worker in enumerate(workers[:MOST_WORKERS]):
            # Long spans first: those within them lie on top.
            own = sorted(
                (s for s in spans if s.worker == worker and s.name != STEP), key=lambda s: s.start - s.end
            )
            for span in own:
                colour = TIMING.get(_SAME_AS.get(span.name, span.name)) or _MORE.get(span.name) or GREY
                used[span.name] = colour
                half = span.name == "write_checkpoint"  # beside what the worker does
                axes.barh(
                    line + (0.3 if half else 0.0),
                    span.end - span.start,
                    left=span.start - whole.start,
                    height=0.2 if half else 0.75,
                    color=colour,
                )
        axes.set_xlim(left=0.0)
        axes.axvline(whole.end - whole.start, color=RED, linewidth=1.0)
        shown = [plain(worker) for worker in workers[:MOST_WORKERS]]
        axes.set_yticks(range(len(shown)), shown, fontsize=11)
        axes.invert_yaxis()
        axes.xaxis.set_major_locator(AutoLocator())
        more = f", {len(workers) - MOST_WORKERS} more workers" if len(workers) > MOST_WORKERS else ""
        axes.set_ylabel(f"step {step}{more}", fontsize=13, color=INK)
    all_axes[-1].set_xlabel("seconds", fontsize=13, color=INK, labelpad=8)
    handles = [Patch(color=colour, label=plain(name)) for name, colour in used.items()]
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": 6}
    figure.legend(handles=handles, frameon=False, fontsize=11, labelcolor=INK, **place)
    return figure


def _size(steps: Mapping[int, Sequence[Span]]) -> tuple[float, float]:
    lines = sum(min(MOST_WORKERS, len({span.worker for span in spans})) for spans in steps.values())
    return SIZE_INCHES[0], max(4.0, 2.0 + 0.4 * lines)


def _order(worker: str) -> tuple[int, str, int]:
    """The controller, ranks, engines, reward workers; each by number."""
    kind, _, number = worker.rpartition(" ")
    kinds = ("", "training rank", "rollout engine", "reward worker")
    place = kinds.index(kind) if kind in kinds else len(kinds)
    return place, kind, int(number) if number.isdigit() else -1
