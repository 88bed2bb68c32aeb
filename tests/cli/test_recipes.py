from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.recipe import library

RUNNER = CliRunner()


def test_list_names_every_recipe() -> None:
    result = RUNNER.invoke(app, ["recipes"])
    assert result.exit_code == 0
    for info in library.available():
        assert info.name in result.stdout and info.description.split()[0] in result.stdout


def test_print_is_the_file_byte_for_byte() -> None:
    assert RUNNER.invoke(app, ["recipes", "tiny-sft"]).stdout == library.read("tiny-sft")


def test_copies_a_recipe_and_never_over_a_file(tmp_path: Path) -> None:
    out = tmp_path / "my.yaml"
    assert RUNNER.invoke(app, ["recipes", "tiny-sft", "--out", str(out)]).exit_code == 0
    assert out.read_text() == library.read("tiny-sft")
    out.write_text("mine")
    result = RUNNER.invoke(app, ["recipes", "tiny-sft", "--out", str(out)])
    assert result.exit_code == 1 and "not overwritten" in result.stderr
    assert out.read_text() == "mine"


def test_says_where_a_copy_cannot_be_written(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["recipes", "tiny-sft", "--out", str(tmp_path / "none" / "my.yaml")])
    assert result.exit_code == 1 and "cannot write" in result.stderr


def test_out_needs_a_name(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["recipes", "--out", str(tmp_path / "my.yaml")])
    assert result.exit_code == 1 and "--out needs the name" in result.stderr


def test_refuses_an_unknown_name() -> None:
    result = RUNNER.invoke(app, ["recipes", "../tiny-sft"])
    assert result.exit_code == 1 and "comes with isotrain" in result.stderr
