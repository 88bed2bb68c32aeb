"""The look that pictures share: what is smoothed, thinned and drawn as it is."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from isotrain.observe.plots import MOST_POINTS, plain, plot_run, smooth_line, thinned


def test_smoothing_keeps_a_straight_line_and_skips_gaps() -> None:
    line = np.linspace(5.0, 1.0, 60)
    assert np.allclose(smooth_line(line, 7), line)
    values = np.ones(60)
    values[[0, 20, 59]] = [math.nan, math.inf, -math.inf]
    assert np.allclose(smooth_line(values, 5), 1.0)


def test_thinning_keeps_the_peaks_and_the_ends() -> None:
    steps, values = np.arange(100_001, dtype=np.float64), np.zeros(100_001)
    values[[31_415, 92_653]] = [7.0, -7.0]
    values[500:600] = math.nan
    kept, shown = thinned(steps, values)
    assert len(kept) <= MOST_POINTS + 100 and (np.diff(kept) > 0).all()
    assert kept[shown == 7.0].tolist() == [31_415] and kept[shown == -7.0].tolist() == [92_653]
    assert kept[0] == 0 and kept[-1] == 100_000 and np.isnan(shown).any()
    short = np.arange(MOST_POINTS, dtype=np.float64)
    assert thinned(short, short)[0] is short


def test_text_is_drawn_as_it_is(tmp_path: Path) -> None:
    assert plain("a\tb$") == "a\N{REPLACEMENT CHARACTER}b\\$"
    rows = [{"step": 1, r"val-core/$\frac{$": 1.0}]
    assert len(plot_run(rows, tmp_path, name=r"$\undefined{$")) == 1
