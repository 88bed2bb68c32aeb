"""Runs of `parity certify`: the budget, members of an envelope, and runs in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from isotrain.api import load_recipe
from isotrain.errors import LaunchError, RecipeError
from isotrain.tools.parity.certify import run
from isotrain.tools.parity.certify.run import Children, Plan, TrainedSide, member_settings, plan, seconds_of
from isotrain.tools.parity.read.layer_trace import Update


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400)])
def test_budgets_are_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "-3m", "1e9s", "nan s"])
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="such as 30m"):
        seconds_of(text)


def test_the_envelope_comes_before_seeds() -> None:
    assert (plan(25, 10, 10).members, plan(25, 10, 10).seeds) == (0, 0)
    assert (plan(45, 10, 10).members, plan(45, 10, 10).seeds) == (4, 0)
    assert (plan(150, 10, 10).members, plan(150, 10, 10).seeds) == (8, 3)
    assert plan(125, 10, 10).seeds == 2  # with the compared pair there are three
    assert plan(150, 10, 10, envelope=False).members == 0
    assert plan(10_000, 10, 10).seconds <= 10_000


def test_a_plan_says_what_it_buys() -> None:
    told = " ".join(plan(150, 10, 10).words())
    assert "8 members" in told and "4 seeds" in told
    assert "no envelope" in " ".join(plan(5, 10, 10).words())
    assert "P3: not needed" in " ".join(Plan(0, 0, 0.0, by_truth=True).words())


def test_members_vary_what_only_rounds_otherwise() -> None:
    recipe = load_recipe("tiny-sft")
    found = member_settings(recipe, 8, ranks=True)
    assert [settings[0] for settings in found] == [f"model.perturbation={n}" for n in range(1, 9)]
    assert found[0][1:] == () and found[1][1:] == ("model.attention=padded",)
    assert found[2][1:] == ("data.tokens_per_micro_batch=1024",)
    assert "device.ranks=2" in found[3] and found[4][1:] == ()
    assert all("device.ranks=2" not in settings for settings in member_settings(recipe, 8, ranks=False))


def test_they_stay_recipes() -> None:
    """A pair must fit into a micro-batch, and what is small already is not made smaller."""
    for name in ("tiny-dpo", "tiny-sft", "tiny-grpo"):
        for settings in member_settings(load_recipe(name), 4, ranks=True):
            load_recipe(name, *settings)
    small = load_recipe("tiny-sft", "data.tokens_per_micro_batch=1024")
    assert not any(
        "tokens_per_micro_batch" in text for s in member_settings(small, 4, ranks=False) for text in s
    )


def children(work: Path, recipe: str = "no-such-recipe") -> Children:
    return Children(recipe, ("trainer.steps=1",), work, lambda line: None, time_limit=60)


def test_a_run_of_another_device_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """It would be finished at once, and a certificate would name a device that computed nothing."""
    (tmp_path / "reference").mkdir()
    how = {"recipe": "no-such-recipe", "settings": ["trainer.steps=1"], "label": "cpu-avx2", "variables": {}}
    (tmp_path / "reference.json").write_text(json.dumps({**how, "seconds": 3.0}))
    with pytest.raises(LaunchError, match=r"another way.*choose another --work"):
        children(tmp_path).train("reference", TrainedSide("cpu", (), {}), why="test")
    with pytest.raises(LaunchError, match="another way"):
        children(tmp_path).train("reference", TrainedSide("cpu-avx2", (), {"A": "1"}), why="test")


def test_a_run_that_was_stopped_is_not_finished_on_another_device(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="failed"):
        children(tmp_path).train("reference", TrainedSide("cpu-avx2", (), {}), why="test")
    (tmp_path / "reference").mkdir()  # it had come to its first checkpoint
    with pytest.raises(LaunchError, match="another way"):
        children(tmp_path).train("reference", TrainedSide("cpu", (), {}), why="test")
    with pytest.raises(LaunchError, match="reference on cpu-avx2 failed"):
        children(tmp_path).train("reference", TrainedSide("cpu-avx2", (), {}), why="test")


def test_a_run_of_unknown_origin_is_not_finished(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    with pytest.raises(LaunchError, match="another way"):
        children(tmp_path).train("reference", TrainedSide("cpu", (), {}), why="test")


@pytest.mark.heavy
def test_a_failure_says_what_the_run_said(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"reference on cpu failed(.|\n)*no-such-recipe"):
        children(tmp_path).train("reference", TrainedSide("cpu", (), {}), why="test")


@pytest.mark.parametrize(("route", "asked"), [([[0, 1]], 0), ([[1, 0]], 0), ([[0, 2]], 1)])
def test_a_candidate_with_other_routes_gets_a_truth_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: list[list[int]], asked: int
) -> None:
    def trace(path: Path) -> dict[int, Update]:
        routes = {"reference": [[0, 1]], "candidate": route}.get(path.name)
        return {1: Update((), 2.0, {}, routes={"experts": np.array(routes, np.int32)})} if routes else {}

    commands: list[Sequence[str]] = []
    monkeypatch.setattr(run, "read_layer_trace", trace)
    monkeypatch.setattr(run.Children, "_run", lambda self, name, command, *_: commands.append(command))
    sides = [run.Finished(tmp_path / name, 1.0) for name in ("reference", "candidate")]
    children(tmp_path).hold_against_float64(sides[1], recipe_of=sides[0])
    expected = ["parity", "truth", str(sides[0].path), "--routes", str(sides[1].path)]
    assert commands == [expected] * asked
