"""The reference's log-probs are computed once, found again, never taken for another model or other data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from isotrain.errors import RecipeError
from isotrain.recipe.schema import Recipe
from isotrain.trainers.launch import launch
from preference_runs import assert_same_run, preference_recipe, write_preferences
from support import run_cli, stable_metrics, write_recipe

pytestmark = pytest.mark.heavy

ALGORITHMS = ("dpo", "kto")
ANCHOR = {"dpo": np.log(2), "kto": 0.5}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_preferences(tmp_path, count=40)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "references"


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """The tiny model where it may be changed."""
    shutil.copytree(tiny / "model", tmp_path / "own" / "model")
    return tmp_path / "own"


def train(recipe: Recipe) -> list[dict[str, float]]:
    launch(recipe, "")
    return stable_metrics(recipe.output)


def other_weights(model: Path) -> None:
    file = model / "model" / "model.safetensors"
    tensors = {name: tensor * 1.3 for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_is_the_live_reference(
    tiny: Path, rows: Path, tmp_path: Path, cache: Path, device_type: str, name: str
) -> None:
    def run(output: str, where: str, **sections: dict[str, Any]) -> list[dict[str, float]]:
        sections = {"algorithm": {"name": name, "reference": where}, "trainer": {"steps": 8}, **sections}
        sections["data"] = {"validation": str(rows / f"{recipe_kind[name]}-held-out.jsonl")}
        return train(preference_recipe(name, tiny, rows, tmp_path / output, device_type, **sections))

    recipe_kind = {"dpo": "pairs", "kto": "responses"}
    live = run("live", "live")
    assert not cache.exists()
    assert_same_run(live, run("cached", "cached"), abs_=2e-5)
    files = {file: file.read_bytes() for file in cache.iterdir()}
    assert len(files) == 2, "training and validation"
    again = run("again", "auto")
    assert again == stable_metrics(tmp_path / "cached"), "bit for bit, from what the first run left"
    assert {file: file.read_bytes() for file in cache.iterdir()} == files


def test_only_what_is_drawn_is_computed(
    tiny: Path, rows: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(output: str, steps: int) -> tuple[int, str]:
        sections = {"trainer": {"steps": steps}, "observe": {"loggers": ["console"]}}
        launch(preference_recipe("dpo", tiny, rows, tmp_path / output, "cpu", **sections), "")
        (file,) = cache.iterdir()
        known = ~np.isnan(np.fromfile(file, "<f4").reshape(-1, 2)).any(1)
        return int(known.sum()), capsys.readouterr().out

    known, said = run("short", 2)
    assert known == 16 and "reference log-probs of 16 items" in said
    # As a run that was killed while it computed them.
    known, said = run("long", 20)
    assert known == 40 and "reference log-probs of 24 items" in said
    known, said = run("third", 20)
    assert known == 40 and "reference log-probs" not in said


@pytest.mark.parametrize("name", ALGORITHMS)
def test_another_model_has_its_own(model: Path, rows: Path, tmp_path: Path, cache: Path, name: str) -> None:
    def first_loss(output: str) -> float:
        recipe = preference_recipe(name, model, rows, tmp_path / output, "cpu", trainer={"steps": 1})
        return train(recipe)[0]["train/loss"]

    assert first_loss("before") == pytest.approx(ANCHOR[name], abs=1e-5)
    other_weights(model)
    assert first_loss("after") == pytest.approx(ANCHOR[name], abs=1e-5), "0 away from its own reference"
    assert len(list(cache.iterdir())) == 2


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("changed", ["model.path", "data.train"])
def test_a_resumed_run_refuses_what_has_changed(
    model: Path, rows: Path, tmp_path: Path, changed: str
) -> None:
    def recipe(steps: int) -> Recipe:
        return preference_recipe("dpo", model, rows, tmp_path / "run", "cpu", trainer={"steps": steps})

    train(recipe(2))
    if changed == "model.path":
        other_weights(model)
    else:
        write_preferences(rows, count=40, seed=5)
    with pytest.raises(RecipeError, match=rf"{changed}: has changed since the run in .* started"):
        train(recipe(4))


@pytest.mark.slow
def test_two_ranks_share_it(tiny: Path, rows: Path, tmp_path: Path, cache: Path) -> None:
    """Each rank computes its part; both read all."""
    two = preference_recipe("kto", tiny, rows, tmp_path / "two", "cpu", device={"ranks": 2})
    run_cli("train", str(write_recipe(two, tmp_path / "two.yaml")))
    (file,) = cache.iterdir()
    of_two = np.fromfile(file, "<f4")
    file.unlink()
    train(preference_recipe("kto", tiny, rows, tmp_path / "one", "cpu"))
    np.testing.assert_allclose(of_two, np.fromfile(file, "<f4"), rtol=1e-5, atol=1e-4)
