"""The recipes that come with isotrain, by name."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

from isotrain.errors import RecipeError
from isotrain.language import tr
from isotrain.recipe import document
from isotrain.recipe.document import read_source

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class RecipeInfo:
    name: str
    description: str
    algorithm: str
    path: Path


def folder() -> Path:
    """Inside the package when installed from a wheel, at the top of the repository in a checkout."""
    packaged = _PACKAGE / "recipes"
    return packaged if packaged.is_dir() else _PACKAGE.parents[1] / "recipes"


def available() -> list[RecipeInfo]:
    """The shipped recipes, by name."""
    return [_info(path) for path in sorted(folder().glob("*.yaml"))]


def find(name: str) -> Path:
    """The file of a shipped recipe; only listed names are found, so that no name leads elsewhere."""
    names = {path.stem: path for path in sorted(folder().glob("*.yaml"))}
    if name in names:
        return names[name]
    near = get_close_matches(name[:100], names, n=1)
    raise RecipeError(_no_such(name, near[0] if near else None, list(names)))


def _no_such(name: str, near: str | None, names: list[str]) -> str:
    if near is not None:
        return tr(
            "no recipe called {name!r} comes with isotrain; did you mean {near!r}?", name=name, near=near
        )
    return tr(
        "no recipe called {name!r} comes with isotrain; there are: {names}", name=name, names=", ".join(names)
    )


def read(name: str) -> str:
    """The text of a shipped recipe."""
    return read_source(find(name))


def locate(given: str) -> Path:
    """A command-line argument: a file, or else the bare name of a shipped recipe."""
    path = Path(given)
    bare = "/" not in given and "\\" not in given and path.suffix not in (".yaml", ".yml") and path.name
    if not bare or path.is_file():
        return path
    try:
        return find(given)
    except RecipeError as error:
        (reason,) = error.args
        raise RecipeError(tr("{path}: no such file, and {reason}", path=given, reason=reason)) from None


def _info(path: Path) -> RecipeInfo:
    text = read_source(path)
    values = document.parse(text, str(path)).values
    algorithm = values.get("algorithm") if isinstance(values, dict) else None
    name = algorithm.get("name") if isinstance(algorithm, dict) else None
    return RecipeInfo(path.stem, _first_paragraph(text), str(name or ""), path)


def _first_paragraph(text: str) -> str:
    """The comment at the top of a recipe, up to the first empty line."""
    lines = takewhile(lambda line: line.startswith("#") and line.strip("# "), text.splitlines())
    return " ".join(line.strip("# ") for line in lines)
