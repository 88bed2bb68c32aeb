"""Runs in processes of their own: what is used again, what is refused, what a failure says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isotrain.errors import LaunchError
from isotrain.parity.children import Children, Side


def children(work: Path, recipe: str = "no-such-recipe") -> Children:
    return Children(recipe, ("trainer.steps=1",), work, lambda line: None, time_limit=60)


def test_a_run_of_another_device_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """It would be finished at once, and a certificate would name a device that computed nothing."""
    (tmp_path / "reference").mkdir()
    how = {"recipe": "no-such-recipe", "settings": ["trainer.steps=1"], "label": "cpu-avx2", "variables": {}}
    (tmp_path / "reference.json").write_text(json.dumps({**how, "seconds": 3.0}))
    with pytest.raises(LaunchError, match=r"another way.*choose another --work"):
        children(tmp_path).train("reference", Side("cpu", (), {}), why="test")
    with pytest.raises(LaunchError, match="another way"):
        children(tmp_path).train("reference", Side("cpu-avx2", (), {"A": "1"}), why="test")


def test_a_run_that_was_stopped_is_not_finished_on_another_device(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="failed"):
        children(tmp_path).train("reference", Side("cpu-avx2", (), {}), why="test")
    (tmp_path / "reference").mkdir()  # it had come to its first checkpoint
    with pytest.raises(LaunchError, match="another way"):
        children(tmp_path).train("reference", Side("cpu", (), {}), why="test")
    with pytest.raises(LaunchError, match="reference on cpu-avx2 failed"):
        children(tmp_path).train("reference", Side("cpu-avx2", (), {}), why="test")


def test_a_run_of_unknown_origin_is_not_finished(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    with pytest.raises(LaunchError, match="another way"):
        children(tmp_path).train("reference", Side("cpu", (), {}), why="test")


@pytest.mark.heavy
def test_a_failure_says_what_the_run_said(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"reference on cpu failed(.|\n)*no-such-recipe"):
        children(tmp_path).train("reference", Side("cpu", (), {}), why="test")
