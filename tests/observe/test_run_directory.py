from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from isotrain.errors import DataError, RecipeError
from isotrain.observe.run_directory import RunDirectory, write_atomically


def test_create_writes_the_three_files(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "a" / "run", "name: x  # why\n", {"name": "x"}, {"python": "3"})
    assert run.recipe.read_text() == "name: x  # why\n"
    assert json.loads(run.resolved.read_text()) == {"name": "x"}
    assert json.loads(run.environment.read_text()) == {"starts": [{"python": "3"}]}
    assert run.checkpoints.is_dir()
    assert not list(run.path.glob(".*")), "a temporary file was left behind"


def test_opening_touches_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert run.starts() == []
    assert not run.path.exists()


def test_a_second_start_is_appended(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, "a", {"seed": 1}, {"n": 1})
    RunDirectory.create(tmp_path, "a", {"seed": 1}, {"n": 2})
    assert RunDirectory(tmp_path).starts() == [{"n": 1}, {"n": 2}]


def test_facts_join_the_newest_start(tmp_path: Path) -> None:
    for number in (1, 2):
        run = RunDirectory.create(tmp_path, "a", {}, {"n": number})
    run.add_to_start({"model": {"fused": ("rotary",)}})
    assert run.starts() == [{"n": 1}, {"n": 2, "model": {"fused": ["rotary"]}}]


def test_what_json_cannot_say_becomes_text(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", {}, {"device": {"path": Path("x")}})
    assert run.starts() == [{"device": {"path": "x"}}]


def test_a_file_in_the_way_is_a_recipe_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"cannot use .* as a run directory"):
        RunDirectory.create(tmp_path / "file", "", {}, {})


@pytest.mark.parametrize("content", ["{", "[]", '{"starts": 1}'])
def test_broken_environment_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "environment.json").write_text(content)
    with pytest.raises(DataError, match=r"environment\.json"):
        RunDirectory(tmp_path).starts()


def test_write_atomically_keeps_the_old_file_on_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    write_atomically(path, "old")

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_write_atomically_leaves_normal_permissions(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "x")
    (tmp_path / "b").write_text("x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
