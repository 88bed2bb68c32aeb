"""Profiled steps of a supervised run: spans and traces, no other numbers, nothing in other steps."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
import torch

from isotrain.data.loader import BatchLoader
from isotrain.device.base import Profiler
from isotrain.device.detect import find_device
from isotrain.errors import RecipeError
from isotrain.observe.run_directory import RunDirectory
from isotrain.observe.spans import SpanLog, read_spans
from isotrain.tools.profile.analyse import UNACCOUNTED, profile_of
from isotrain.trainers import profiling
from isotrain.trainers.launch import launch
from isotrain.trainers.profiling import RankProfile
from support import stable_metrics, tiny_recipe


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Profiler]:
    """The profilers that ranks have asked their devices for."""
    asked: list[Profiler] = []
    begin = RankProfile.begin

    def noted(self: RankProfile) -> None:
        begin(self)
        assert self._profiler is not None
        asked.append(self._profiler)

    monkeypatch.setattr(RankProfile, "begin", noted)
    return asked


@pytest.mark.heavy
def test_a_profile_changes_no_number_and_other_steps_have_none(
    tiny: Path, tmp_path: Path, device_type: str, made: list[Profiler]
) -> None:
    trainer = {"steps": 4, "save_every": 2}
    launch(tiny_recipe(tiny, tmp_path / "plain", device_type, trainer=trainer), "")
    assert not made and not (tmp_path / "plain" / "profile").exists()
    observe = {"loggers": [], "profile": {"steps": [2, 3]}}
    launch(tiny_recipe(tiny, tmp_path / "run", device_type, trainer=trainer, observe=observe), "")
    assert len(made) == 2
    assert stable_metrics(tmp_path / "run") == stable_metrics(tmp_path / "plain")
    run = RunDirectory(tmp_path / "run")
    steps = read_spans(run)
    assert list(steps) == [2, 3]
    names = [{span.name for span in spans} for spans in steps.values()]
    assert "save" in names[0] and "save" not in names[1]
    assert all({"step", "data", "update", "write_metrics"} <= of_step for of_step in names)
    assert len(list(run.profile.glob("step-*/trace-rank-0.json*"))) == 2


@pytest.mark.heavy
def test_data_that_comes_slowly_is_named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = BatchLoader.next_step

    def slow(self: BatchLoader) -> object:
        time.sleep(3.0)
        return before(self)

    monkeypatch.setattr(BatchLoader, "next_step", slow)
    observe = {"loggers": [], "profile": {"steps": [2], "trace": False}}
    launch(tiny_recipe(tiny, tmp_path / "run", "cpu", trainer={"steps": 2}, observe=observe), "")
    run = RunDirectory(tmp_path / "run")
    found = profile_of(run, read_spans(run))
    assert found.largest == "data" and found.shares[UNACCOUNTED] < 0.1, found.lines()
    assert not found.traces and "ISOTRAIN_CACHE" in found.advice


def test_steps_that_the_run_does_not_have(tiny: Path, tmp_path: Path) -> None:
    observe = {"loggers": [], "profile": {"steps": [2, 5]}}
    recipe = tiny_recipe(tiny, tmp_path / "run", "cpu", trainer={"steps": 4}, observe=observe)
    with pytest.raises(RecipeError, match=r"observe\.profile\.steps: .* after step 4, so step 5 .* up to 4"):
        launch(recipe, "")


@pytest.fixture
def profile(tmp_path: Path, device_type: str) -> RankProfile:
    log = SpanLog("training rank 0", on=True)
    return RankProfile(log, RunDirectory(tmp_path), find_device(device_type), 0, True)


def operators(profile: RankProfile) -> profiling.Profiled:
    device = profile._device
    torch.ones(3, 3, device=device.type) @ torch.ones(3, 3, device=device.type)
    profile.begin()
    torch.ones(5, 5, device=device.type).softmax(0)
    return profile.end(3)


def test_a_trace_has_the_operators_of_its_step(
    profile: RankProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert operators(profile).problem is None
    file = tmp_path / "profile" / "step-000003" / "trace-rank-0.json"
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert "aten::softmax" in names and not any("mm" in str(name) for name in names)
    monkeypatch.setattr(profiling, "LARGEST_PLAIN", 100)
    assert operators(profile).problem is None
    assert not file.exists(), "only the compressed one is left"
    assert b"aten::softmax" in gzip.decompress(file.with_name(f"{file.name}.gz").read_bytes())


def test_a_disk_that_is_full_costs_the_trace_only(profile: RankProfile, tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file where the directory should be")
    profiled = operators(profile)
    assert [span.name for span in profiled.spans] == ["step"]
    assert profiled.problem is not None and "rank 0 has no trace of step 3" in profiled.problem
