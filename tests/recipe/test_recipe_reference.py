from __future__ import annotations

from pathlib import Path

from isotrain.recipe.fields import leaves
from isotrain.recipe.reference import main, render
from isotrain.recipe.schema import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "recipe-reference.md"


def test_the_committed_page_is_up_to_date() -> None:
    assert main(["--check", str(PAGE)]) == 0, (
        f"run `python -m isotrain.recipe.reference {PAGE.name}` in docs/"
    )


def test_every_field_is_there_with_a_docstring() -> None:
    page = render()
    for leaf in leaves(Recipe):
        assert f"| `{leaf.path}` |" in page
        assert leaf.info.description, f"{leaf.path} has no docstring"


def test_rows_of_tables_are_lines() -> None:
    rows = [line for line in render().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    for line in rows:
        assert line.endswith(" |") and line.replace("\\|", "").count("|") == 6


def test_what_variants_share_is_there_once() -> None:
    page = render()
    assert page.count("| `algorithm.ppo_epochs` |") == page.count("| `algorithm.loss.clip_ratio_low` |") == 1
    assert page.count("| `algorithm.name` |") == 11
    assert page.index("## `algorithm`: `ppo` also has") < page.index("| `algorithm.lam` |")


def test_check_fails_on_an_old_page_and_changes_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert main(["--check", str(page)]) == 1 and not page.exists()
    page.write_text("old")
    assert main(["--check", str(page)]) == 1 and page.read_text() == "old"
    assert main([str(page)]) == 0 and main(["--check", str(page)]) == 0
