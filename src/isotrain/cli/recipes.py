"""`isotrain recipes`, `import` and `export-config`: shipped recipes, and those of other frameworks."""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from isotrain.cli.arguments import Overrides, RecipeName
from isotrain.errors import RecipeError
from isotrain.recipe import library
from isotrain.terminal import rich_console

if TYPE_CHECKING:
    from isotrain.tools.imports.convert import Imported
    from isotrain.tools.imports.draft import KeyFinding


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
    write_new(out, text)
    typer.echo(f"wrote {out}")


def _list() -> None:
    from rich.table import Table

    table = Table("name", "algorithm", "what it does", box=None, header_style="bold", pad_edge=False)
    for info in library.available():
        table.add_row(info.name, info.algorithm, info.description)
    rich_console().print(table)


_SHOWN = 40


class Framework(str, Enum):
    verl = "verl"
    openrlhf = "openrlhf"
    trl = "trl"


def import_recipe(
    framework: Annotated[Framework, Argument(help="Whose script it is.")],
    source: Annotated[
        str,
        Argument(
            metavar="SOURCE",
            help="A shell script, a command line, Hydra overrides, a resolved configuration, a log, or TRL's "
            "Python script or YAML; - for standard input.",
        ),
    ],
    out: Annotated[Path | None, Option(help="The file to write; standard output by default.")] = None,
    force: Annotated[bool, Option("--force", help="Overwrite that file.")] = False,
    version: Annotated[
        str | None,
        Option(help="Whose defaults to write out; the newest known, or what the source reveals, by default."),
    ] = None,
    rows: Annotated[
        int | None, Option(min=1, help="Rows of the training data, for what a script gives in steps.")
    ] = None,
    set_variables: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="NAME=VALUE",
            help="A variable of the script; give several. It decides conditions, and goes before what the "
            "script assigns.",
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print recipe and report as JSON.")] = False,
) -> None:
    """Write a recipe from a training script of verl, OpenRLHF or TRL.

    The script is read, never run. Behind each field is a comment with the key that it came from. The exit
    code is 0 if the recipe means the same training, and 1 if something that changes it was not taken over.

    Examples:

        isotrain import verl run_grpo.sh --out grpo.yaml

        isotrain import verl train.log --out grpo.yaml

        isotrain import verl run_grpo.sh --set NODES=2

        isotrain import openrlhf - < run.sh

        isotrain import trl train_grpo.py --set num_processes=8 --out grpo.yaml
    """
    from isotrain.tools.imports.convert import convert
    from isotrain.tools.imports.read import read_bytes

    result = convert(read_bytes(source), framework.value, version, rows, _variables(set_variables or []))
    if out is not None:
        write_new(out, result.recipe, force)
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=2, ensure_ascii=False))
    else:
        if out is None:
            typer.echo(result.recipe, nl=False)
        typer.echo(report(result, out), err=True)
        if version is None and result.kind == "script":
            guess = f"{result.version} is a guess, the script does not say it: --version has others"
            typer.echo(guess, err=True)
    raise typer.Exit(0 if result.same_training else 1)


def _variables(texts: list[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*|\d|if:\d+", name):
            raise RecipeError(f"--set {text}: expected NAME=VALUE, such as --set NODES=2")
        if name.startswith("if:") and value not in ("true", "false"):
            raise RecipeError(f"--set {text}: a condition is true or false")
        variables[name] = value
    return variables


class Target(str, Enum):
    verl = "verl"


def export_config(
    recipe: RecipeName,
    overrides: Overrides = None,
    to: Annotated[Target, Option(help="Whose command to write.")] = Target.verl,
    out: Annotated[Path | None, Option(help="The file to write; standard output by default.")] = None,
    force: Annotated[bool, Option("--force", help="Overwrite that file.")] = False,
) -> None:
    """Write a recipe as a command of verl.

    The command is read back with `isotrain import`. Every field that comes back with another value is listed;
    the exit code is 1 if one of them changes the training.

    Example:

        isotrain export-config gsm8k-grpo-8x --to verl --out run_verl.sh
    """
    from isotrain.api import load_recipe
    from isotrain.tools.imports.export import to_verl

    result = to_verl(load_recipe(recipe, *(overrides or [])))
    if out is not None:
        write_new(out, result.script, force)
    else:
        typer.echo(result.script, nl=False)
    lost = [item for item in result.differences if item.changes]
    typer.echo(
        f"{len(result.overrides)} keys, {len(result.differences)} fields are not carried over", err=True
    )
    for item in result.differences:
        effect = "" if item.changes else " [the training is the same]"
        typer.echo(f"  {item.field}: {item.here!r} would become {item.there!r}{effect}", err=True)
    raise typer.Exit(1 if lost else 0)


def write_new(path: Path, text: str, force: bool | None = None) -> None:
    """Write a file that is not there yet, or any with `force`; None where the command has no --force."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        remedy = "give another --out" + ("" if force is None else ", or --force to overwrite it")
        raise RecipeError(f"{path} exists and is not overwritten: {remedy}") from None
    except OSError as error:
        raise RecipeError(f"cannot write {path}: {error.strerror}") from None


def report(result: Imported, out: Path | None) -> str:
    """The counts, and what to do about keys that are not in the recipe."""
    counts = result.account
    what = "words" if result.kind == "script" else "keys"
    lines = [
        f"{result.framework} {result.version} ({result.kind}): {sum(counts.values())} {what}: "
        f"{counts['mapped']} mapped, {counts['no effect']} without effect, {counts['refused']} refused, "
        f"{counts['unknown']} unknown; {len(result.questions)} questions"
    ]
    for title, findings in (
        ("questions", result.questions),
        ("refused", result.refused),
        ("unknown", result.unknown),
    ):
        lines += _section(title, findings)
    if result.conditions:
        lines += ["conditions:", *(f"  {line}" for item in result.conditions for line in item.report())]
    lines += [f"note: {note}" for note in result.notes]
    name = str(out) if out else "RECIPE"
    if result.same_training:
        rest = "; the notes are differences that stay" if result.notes else ""
        partly = counts["refused"] or counts["unknown"]
        whole = (
            "The training is the same, but not all of its surroundings"
            if partly
            else "Everything was taken over"
        )
        lines.append(f"{whole}{rest}. Next: isotrain train {name} --dry-run")
    else:
        lines.append(f"Not the same training yet: read the lists above and change {name}")
    return "\n".join(lines)


def _section(title: str, findings: list[KeyFinding]) -> list[str]:
    lines = [f"{title}:"] if findings else []
    for item in findings[:_SHOWN]:
        where = f" (line {item.line})" if item.line else ""
        effect = "" if item.changes else " [the training is the same]"
        lines.append(f"  {item.key}{where}: {item.why}{effect}")
    if len(findings) > _SHOWN:
        lines.append(f"  ... and {len(findings) - _SHOWN} more, all in the recipe's comments")
    return lines
