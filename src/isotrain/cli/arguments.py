"""Arguments that several commands share, and options with several values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe, such as optimizer.lr=1e-4."),
]
RecipeName = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe file, or the name of one that `isotrain recipes` lists."),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory: `output` of its recipe.")]
AsJson = Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")]
_BETWEEN = "\0"  # what no path has in it


def command_with(**counts: int) -> type[TyperCommand]:
    """A command whose options take so many values; 0: all up to the next option.

    As in `--pair A B`, repeated: typer has either several values or repetition, but not both at once.
    """

    class Command(TyperCommand):
        several: ClassVar[dict[str, int]] = {f"--{name}": count for name, count in counts.items()}

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            joined, rest = [], list(args)
            while rest:
                joined.append(rest.pop(0))
                count = self.several.get(joined[-1])
                if count is None:
                    continue
                if count == 0:
                    count = next((n for n, text in enumerate(rest) if text.startswith("-")), len(rest))
                if 0 < count <= len(rest):
                    joined.append(_BETWEEN.join(rest[:count]))
                    del rest[:count]
            parsed: list[str] = super().parse_args(ctx, joined)
            return parsed

    return Command


def values_of(text: str) -> list[str]:
    return text.split(_BETWEEN)


def paths_of(text: str) -> list[Path]:
    return [Path(part) for part in values_of(text)]
