"""Arguments that several commands share."""

from typing import Annotated

import typer

RecipeName = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe file, or the name of one that `isotrain recipes` lists."),
]
