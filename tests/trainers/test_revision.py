"""Models of the Hub at a revision, from a cache in the Hub client's own layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotrain.errors import ModelError, RecipeError
from isotrain.models.files import hub_commit, model_directory
from isotrain.recipe.load import load_recipe
from isotrain.trainers.start import check_same_data, hub_commits, write_start

OLD, NEW = "1" * 40, "2" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    for commit, names in ((OLD, ["v1"]), (NEW, ["main", "v2"])):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        for name in names:
            (repository / "refs" / name).write_text(commit)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "commit"),
    [
        ("someone/small", NEW),
        ("someone/small@v1", OLD),
        ("someone/small@v2", NEW),
        (f"someone/small@{OLD}", OLD),
    ],
)
def test_a_revision_is_a_commit(path: str, commit: str) -> None:
    assert model_directory(path).name == commit == hub_commit(path)


def test_a_revision_that_is_not_there() -> None:
    with pytest.raises(ModelError, match=r"model.path: 'someone/small@v3' is neither"):
        model_directory("someone/small@v3")


def test_local_directories_have_no_commit(tmp_path: Path) -> None:
    local = tmp_path / "mine@home"
    local.mkdir()
    (local / "config.json").write_text("{}")
    assert model_directory(str(local)) == local and hub_commit(str(local)) is None


def test_a_start_records_the_commits(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: r\noutput: out\nmodel: {path: someone/small@v1}\n"
        "data: {train: rows.jsonl}\nalgorithm: {name: sft}\n"
    )
    assert hub_commits(load_recipe(recipe)) == {"model.path": OLD}


def test_a_branch_that_has_moved_does_not_resume(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"name: r\noutput: {tmp_path}/run\nmodel: {{path: someone/small}}\n"
        "data: {train: rows.jsonl}\nalgorithm: {name: sft}\n"
    )
    recipe = load_recipe(file)
    write_start(recipe, file.read_text(), {}, {})
    check_same_data(recipe, {})
    (cache / "models--someone--small" / "refs" / "main").write_text(OLD)
    with pytest.raises(RecipeError, match=rf"model.path: the Hub has another commit .* write name@{NEW}"):
        check_same_data(recipe, {})
