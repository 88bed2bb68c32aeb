from __future__ import annotations

from pathlib import Path

import pytest

from isotrain.errors import RecipeError
from isotrain.recipe import library
from isotrain.recipe.load import load_recipe

REPOSITORY = Path(__file__).parents[2]


def test_every_shipped_recipe_loads_and_describes_itself() -> None:
    found = library.available()
    assert "tiny-sft" in {info.name for info in found}
    for info in found:
        recipe = load_recipe(info.path)
        assert recipe.name == info.name and recipe.algorithm.name == info.algorithm
        assert len(info.description) > 20, f"{info.path}: the first line is no comment that describes it"
        assert info.description.endswith("."), f"{info.path}: {info.description!r} is cut short"


def test_read_gives_the_text() -> None:
    assert library.read("tiny-sft") == (REPOSITORY / "recipes" / "tiny-sft.yaml").read_text()


@pytest.mark.parametrize(
    "name", ["../pyproject", "/etc/passwd", "tiny-sft.yaml", "", ".", "..", "*", "recipes/tiny-sft"]
)
def test_no_name_leads_out_of_the_folder(name: str) -> None:
    with pytest.raises(RecipeError, match="comes with isotrain"):
        library.read(name)


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(RecipeError, match="did you mean 'tiny-sft'"):
        library.find("tiny_sft")


def test_locate_prefers_a_file_and_leaves_paths_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert library.locate("tiny-sft") == library.find("tiny-sft")
    assert library.locate("./tiny-sft") == Path("tiny-sft")
    assert library.locate("other.yaml") == Path("other.yaml")
    with pytest.raises(RecipeError, match="no such file, and no recipe called 'other'"):
        library.locate("other")
    (tmp_path / "tiny-sft").write_text("name: mine")
    assert library.locate("tiny-sft") == Path("tiny-sft")


def test_an_installed_package_has_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_PACKAGE", tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "only.yaml").write_text(
        "# The only\n# one.\n#\n# More of it.\nalgorithm: {name: sft}\n"
    )
    assert [(info.name, info.description, info.algorithm) for info in library.available()] == [
        ("only", "The only one.", "sft")
    ]
