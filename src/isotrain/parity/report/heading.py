"""The words above a picture."""

from __future__ import annotations

from matplotlib.figure import Figure

from isotrain.observe.plotting import GREY, INK, plain

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
