"""How the benchmark of the simulator fits parameters, changes settings and counts errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from simulate.lengths import Constant
from simulate.run import simulate
from simulate.settings import Decode, Engines, Run, Update
from simulated_figures import FITTED, HELD_OUT, Figure, fit, swap, table
from simulated_here import OWN_64, OWN_1024, TRAJECTORIES, controller, controller_costs, work_stealing
from simulated_predictions import DENSE, MIXTURE, MODES, build, central, route_of, routes, sync_of
from simulated_published import DEEPSEEK_16, KIMI_16, weight_line, weight_sync


def test_a_fit_finds_the_parameter() -> None:
    assert fit(lambda x: x**2, 9.0, 0.1, 100.0) == pytest.approx(3.0, rel=1e-3)


def test_nested_settings_change() -> None:
    run = Run(2, 2, Constant(5), Engines(1, Decode(0.1), 4), Update())
    changed = swap(run, prompts=3, engines__count=2, engines__decode__base=0.5)
    assert (changed.prompts, changed.engines.count, changed.engines.decode.base) == (3, 2, 0.5)
    assert changed.engines.at_once == 4 and run.engines.count == 1


def test_errors_are_relative_to_the_target() -> None:
    figure = Figure("case", "s step", "here", 4.0, 3.0, HELD_OUT, "measured: all")
    assert figure.error == pytest.approx(-0.25)
    assert "| 4 | 3 | -25% | held out |" in table([figure])


def test_fits_go_through_their_own_figures_only() -> None:
    own, a_rank, _, _ = controller_costs()
    for ranks, seconds in ((64, OWN_64), (1024, OWN_1024)):
        assert own * TRAJECTORIES + a_rank * ranks == pytest.approx(seconds)
    for gigabytes, seconds in (DEEPSEEK_16, KIMI_16):
        assert weight_line().seconds(gigabytes) == pytest.approx(seconds)
    for figures in (controller(), weight_sync()):
        assert all(abs(figure.error) < 0.01 for figure in figures if figure.kind == FITTED)
        assert any(figure.kind == HELD_OUT for figure in figures)


def test_figures_without_a_fit_are_close() -> None:
    assert all(abs(figure.error) < 0.1 for figure in work_stealing())


def test_a_slice_stands_for_the_whole() -> None:
    """One of four parts: all that is common is that of the whole."""
    whole, part = (build(DENSE, 1024, 512, "in flight", slices) for slices in (1, 4))
    assert part.engines.count * 4 == whole.engines.count and part.prompts * 4 == whole.prompts
    assert part.controller.a_group == pytest.approx(4 * whole.controller.a_group)
    assert part.controller.a_step == whole.controller.a_step and part.sync == whole.sync
    assert part.update.per_token == pytest.approx(4 * whole.update.per_token)
    seconds = [simulate(run, 16).step_seconds for run in (whole, part)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.1)


def test_what_grows_with_devices() -> None:
    few, many = (central(MIXTURE, devices, 1024) for devices in (1024, 10240))
    for name in (
        "controller_step_s",
        "weight_sync_s, colocated",
        "failures_an_hour",
        "lost_share_ranks",
        "lost_share_all",
    ):
        assert many[name] > few[name], name
    assert many["controller_collect_s"] == few["controller_collect_s"]


@pytest.mark.parametrize("page", ["docs/scale.md", "docs/zh/scale.md"])
def test_the_page_has_the_routes_that_the_code_takes(page: str) -> None:
    """A rate of another route would promise what no run does: then compute the tables anew."""
    rows = [f"| {' | '.join(row.values())} |" for row in routes()]
    text = (Path(__file__).parents[1] / page).read_text()
    assert "\n".join(rows) in text
    for case in (DENSE, MIXTURE):
        for devices in (1024, 10240, 102400):
            seconds = central(case, devices, devices // 2)
            assert len({seconds[f"weight_sync_s, {mode}"] for mode in MODES}) == 1
            row = rf"^\| {case.model.name} \| {devices:,} \| [\d.]+ \| [\d.]+ \| ([\d.]+) \| (\d+) \|"
            (told,) = re.findall(row, text, re.MULTILINE)
            slowest = round(seconds["weight_sync_slow_s"])
            assert told == (str(seconds["weight_sync_s, colocated"]), str(slowest))


def test_another_route_has_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    by_device = {mode: sync_of(MIXTURE, 16, mode) for mode in MODES}
    assert by_device["in flight"].publish == by_device["colocated"].publish < 10
    monkeypatch.setattr("isotrain.trainers.online.worker_groups._goes_by_device", lambda *_: False)
    assert {route_of(mode) for mode in MODES} == {"file"}
    assert all(sync_of(MIXTURE, 16, mode).publish > 10 * by_device[mode].publish for mode in MODES)
