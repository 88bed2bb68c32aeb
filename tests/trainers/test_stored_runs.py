"""Runs that lose their machine resume from the storage of their checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from isotrain.engine.checkpoint.layout import steps_in
from isotrain.engine.checkpoint.storage import Storage
from isotrain.errors import RecipeError
from isotrain.recipe.load import load_recipe, other_run
from isotrain.recipe.schema import Recipe
from isotrain.trainers.launch import launch
from support import run_cli, stable_metrics, tiny_recipe, write_recipe

pytestmark = pytest.mark.heavy


def stored(tiny: Path, output: Path, url: str | None, **sections: Any) -> Recipe:
    trainer = {"steps": 4, "save_every": 2, "checkpoint_storage": url, **sections.pop("trainer", {})}
    return tiny_recipe(tiny, output, "cpu", trainer=trainer, **sections)


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a storage."""
    output = tmp_path_factory.mktemp("whole") / "run"
    launch(stored(tiny, output, None), "")
    return output


def test_a_lost_run_goes_on_exactly(
    tiny: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, output = f"file://{tmp_path}/store", tmp_path / "run"
    launch(stored(tiny, output, url), "")
    assert stable_metrics(output) == stable_metrics(whole)
    assert Storage(url).steps() == [4, 2] and Storage(url).is_complete(4)
    # As if the machine had been lost in step 4.
    (tmp_path / "store" / "step-00000004" / "COMPLETE").unlink()
    shutil.rmtree(output)
    capsys.readouterr()
    launch(stored(tiny, tmp_path / "elsewhere", url, observe={"loggers": ["console"]}), "")
    said = capsys.readouterr().out
    assert "resuming after step 2 of 4" in said
    assert f"checkpoint step-00000004 of {url} is not used: it was not finished" in " ".join(said.split())
    assert stable_metrics(tmp_path / "elsewhere") == stable_metrics(whole)[2:]
    assert Storage(url).is_complete(4) and steps_in(tmp_path / "elsewhere" / "checkpoints") == [4, 2]


def test_resumes_from_storage_with_another_number_of_ranks(tiny: Path, whole: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    launch(stored(tiny, tmp_path / "one", url), "")
    (tmp_path / "store" / "step-00000004" / "COMPLETE").unlink()
    shutil.rmtree(tmp_path / "one")
    recipe = stored(tiny, tmp_path / "two", url, device={"ranks": 2})
    run_cli("train", str(write_recipe(recipe, tmp_path / "two.yaml")))
    found, expected = (
        [row["train/loss"] for row in stable_metrics(run) if row["step"] > 2]
        for run in (tmp_path / "two", whole)
    )
    assert len(stable_metrics(tmp_path / "two")) == 2, "the first steps were not trained again"
    assert found == pytest.approx(expected, rel=1e-5)
    manifest = json.loads((tmp_path / "store" / "step-00000004" / "manifest.json").read_text())
    assert manifest["ranks"] == 2 and Storage(url).is_complete(4)


def test_a_storage_of_another_run_is_refused(tiny: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    launch(stored(tiny, tmp_path / "run", url, trainer={"steps": 1}), "")
    with pytest.raises(RecipeError, match=r"(?s)checkpoint_storage: .*another run:.*seed: "):
        launch(stored(tiny, tmp_path / "other", url).model_copy(update={"seed": 8}), "")
    with pytest.raises(RecipeError, match=r"already has a run; set another URL"):
        launch(stored(tiny, tmp_path / "other", url, trainer={"resume": "never"}), "")
    described = Storage(url).run()
    assert described is not None and described["recipe"]["trainer"]["checkpoint_storage"] == url
    described["data"]["train"] = "0" * 64
    Storage(url).claim(described["recipe"], described["data"])
    with pytest.raises(RecipeError, match=r"(?s)another run:.*data\.train: other content"):
        launch(stored(tiny, tmp_path / "other", url), "")


def test_runs_made_from_a_recorded_one_do_not_write_to_its_storage(tiny: Path, tmp_path: Path) -> None:
    recipe = stored(tiny, tmp_path / "run", f"file://{tmp_path}/store")
    file = write_recipe(recipe, tmp_path / "recipe.yaml")
    derived = load_recipe(file, other_run(tmp_path / "other"))
    assert derived.output == str(tmp_path / "other") and derived.trainer.checkpoint_storage is None
