"""`isotrain recipes`: list, print or copy the shipped recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from isotrain.errors import RecipeError
from isotrain.recipe import library


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print this recipe instead of the list.")
    ] = None,
    out: Annotated[
        Path | None, Option(help="Copy the recipe to this new file instead of printing it.")
    ] = None,
) -> None:
    """List the shipped recipes, print one, or copy one to change it.

    Examples:

        isotrain recipes

        isotrain recipes tiny-sft --out my.yaml
    """
    if name is None:
        if out is not None:
            raise RecipeError("--out needs the name of a recipe: isotrain recipes NAME --out FILE")
        _list()
        return
    text = library.read(name)
    if out is None:
        typer.echo(text, nl=False)
        return
    copy_out(text, out)
    typer.echo(f"wrote {out}")


def copy_out(text: str, out: Path) -> None:
    """Write a new file; one that exists is somebody's work and stays."""
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(f"{out} exists and is not overwritten; give --out another name") from None
    except OSError as error:
        raise RecipeError(f"cannot write {out}: {error.strerror}") from None


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "algorithm", "what it does", box=None, header_style="bold", pad_edge=False)
    for info in library.available():
        table.add_row(info.name, info.algorithm, info.description)
    Console().print(table)
