"""URLs of checkpoint storage: known stores only, and never with a secret in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isotrain.errors import RecipeError
from isotrain.recipe.load import load_recipe
from isotrain.recipe.schema import storage_url_problem
from support import tiny_recipe, write_recipe


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/run",
        "s3://bucket",
        "gs://bucket/a/b_c/run-1.2/",
        "file:///tmp/x",
        "memory://run",
        "az://c/r",
    ],
)
def test_plain_urls(url: str) -> None:
    assert storage_url_problem(url) is None


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("bucket/run", "not a URL of a known store"),
        ("http://host/run", "not a URL of a known store"),
        ("simplecache::s3://bucket/run", "not a URL of a known store"),
        ("S3://bucket/run", "not a URL of a known store"),
        ("s3://KEY:SECRET@bucket/run", "has credentials"),
        ("s3://SECRET@bucket/run", "has credentials"),
        ("az://container/run?sig=SECRET", "has credentials or parameters"),
        ("s3://bucket/run#SECRET", "has credentials or parameters"),
        ("s3://bucket/../other", "begins with a dot"),
        ("s3://bucket//run", "is empty"),
        ("s3://", "is empty"),
        ("file:///a/./b", "begins with a dot"),
        ("s3://bucket/a b", "unusual characters"),
        ("s3://bucket/a\\b", "unusual characters"),
        ("s3://bucket/%2e%2e/x", "unusual characters"),
        ("file::memory://x", "not a URL of a known store"),
        ("s3://bucket/run::zip://SECRET", "unusual characters"),
    ],
)
def test_refused_urls(tmp_path: Path, url: str, problem: str) -> None:
    found = storage_url_problem(url)
    assert found is not None and problem in found and "SECRET" not in found
    file = write_recipe(tiny_recipe(tmp_path, tmp_path / "run", "cpu"), tmp_path / "recipe.yaml")
    with pytest.raises(RecipeError, match=r"trainer\.checkpoint_storage") as error:
        load_recipe(file, [f"trainer.checkpoint_storage={url}"])
    assert "SECRET" not in str(error.value)
    with pytest.raises(RecipeError) as error:
        load_recipe(file, [f"trainer={{checkpoint_storage: '{url}'}}"])
    assert "SECRET" not in str(error.value)
    null, ours = ('"checkpoint_storage":' + json.dumps(value) for value in (None, url))
    assert null in file.read_text()
    file.write_text(file.read_text().replace(null, ours))
    with pytest.raises(RecipeError, match=r"recipe\.yaml:\d+.*trainer\.checkpoint_storage") as error:
        load_recipe(file)
    assert "SECRET" not in str(error.value).replace(str(tmp_path), "")  # which is named after the case


def test_a_password_behind_a_misspelt_key(tmp_path: Path) -> None:
    file = write_recipe(tiny_recipe(tmp_path, tmp_path / "run", "cpu"), tmp_path / "recipe.yaml")
    for override in (
        "trainer.checkpoint_storag=s3://KEY:PASSWORD@bucket/x",
        "trainer.checkpoint_storage=[s3://KEY:PASSWORD@bucket/x]",
    ):
        with pytest.raises(RecipeError) as error:
            load_recipe(file, [override])
        assert "PASSWORD" not in str(error.value) and "KEY" not in str(error.value)


def test_a_port_of_hdfs() -> None:
    assert storage_url_problem("hdfs://names:8020/runs/a") is None
    assert storage_url_problem("s3://bucket:8020/runs/a") is not None
