from __future__ import annotations

import json
from pathlib import Path

import pytest

from isotrain.errors import RecipeError
from isotrain.recipe.difference import difference
from isotrain.recipe.document import parse, to_yaml
from isotrain.recipe.load import load_resolved, parse_recipe, resolved, write_resolved
from isotrain.recipe.schema import Recipe

MINIMAL = "name: a\noutput: b\nmodel: {path: c}\ndata: {train: d}\nalgorithm: {name: sft}\n"


def recipe(*overrides: str) -> Recipe:
    return parse_recipe(MINIMAL, "r.yaml", overrides)


def test_round_trip_is_equal_and_floats_are_exact(tmp_path: Path) -> None:
    odd = 'observe.project="caf\\u00e9 \\U0001F600 \\u2028 \\x7f"'
    before = recipe("optimizer.lr=0.30000000000000004", "optimizer.eps=5e-324", odd)
    write_resolved(before, tmp_path / "resolved.json")
    assert load_resolved(tmp_path / "resolved.json") == before
    assert [path.name for path in tmp_path.iterdir()] == ["resolved.json"]


def test_resolved_has_every_field_in_the_order_of_the_schema() -> None:
    values = resolved(recipe())
    assert list(values) == list(Recipe.model_fields)
    assert values["optimizer"]["betas"] == [0.9, 0.95] and values["trainer"]["steps"] is None
    assert json.loads(json.dumps(values)) == values


def test_a_long_list_of_files_is_read_back(tmp_path: Path) -> None:
    files = [f"data/part-{number:06}.parquet" for number in range(5_000)]
    before = parse_recipe(MINIMAL.replace("{train: d}", f"{{train: [{', '.join(files)}]}}"), "r.yaml")
    write_resolved(before, tmp_path / "resolved.json")
    assert load_resolved(tmp_path / "resolved.json") == before


@pytest.mark.parametrize("text", ["", "[]", "{", '{"seed": NaN}', "[" * 100_000])
def test_a_broken_file_is_a_recipe_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "resolved.json"
    path.write_text(text)
    with pytest.raises(RecipeError, match="not a resolved recipe"):
        load_resolved(path)


def test_a_field_of_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "resolved.json"
    path.write_text(json.dumps({**resolved(recipe()), "sead": 3}))
    with pytest.raises(RecipeError, match="unknown key 'sead'; did you mean 'seed'"):
        load_resolved(path)


def test_difference() -> None:
    assert difference(recipe(), recipe()) == []
    changed = recipe("optimizer.lr=1e-4", "trainer.steps=5", "data.train=[d, e]", "observe.project='null'")
    assert difference(recipe(), changed) == [
        'data.train: d -> ["d", "e"]',
        "optimizer.lr: 1e-05 -> 0.0001",
        "trainer.steps: null -> 5",
        'observe.project: isotrain -> "null"',
    ]


@pytest.mark.parametrize(
    "text", ["1e-4", "null", "yes", "", "a: b", "#x", "*x", "0x1", "1_0", " a ", "a\nb", "true", "-"]
)
def test_yaml_that_we_write_is_yaml_that_we_read(text: str) -> None:
    values = {"text": text, "list": [text, 1, 1e-5, 1e22, None, True]}
    assert parse(to_yaml(values), "r.yaml").values == values
