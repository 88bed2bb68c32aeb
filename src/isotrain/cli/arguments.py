"""Arguments that several commands share."""

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe, such as optimizer.lr=1e-4."),
]
RecipeName = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe file, or the name of one that `isotrain recipes` lists."),
]
