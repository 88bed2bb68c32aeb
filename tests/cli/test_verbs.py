"""The commands by name: what lists say of them, and what a list imports."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from isotrain.cli.main import app
from isotrain.cli.verbs import PARITY_VERBS, VERBS, Verb, load

EVERY = {**VERBS, **{f"parity {name}": verb for name, verb in PARITY_VERBS.items()}}
# What a list of commands can do without: recipes, arrays, and whatever else takes a tenth of a second.
HEAVY = (
    "numpy",
    "yaml",
    "torch",
    "isotrain.recipe",
    "isotrain.api",
    "isotrain.tools.doctor.rules",
)


@pytest.mark.parametrize("name", EVERY)
def test_lists_say_what_the_command_itself_says(name: str) -> None:
    verb: Verb = EVERY[name]
    command = load(name.split()[-1], verb)
    assert command.name in (name.split()[-1], "")
    first = inspect.cleandoc(command.help or "").partition("\n\n")[0].replace("\n", " ")
    assert first == verb.help


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["parity", "--help"], ["trian"]])
def test_a_list_imports_no_command(arguments: list[str]) -> None:
    code = f"""
import sys
from isotrain.cli.main import main
sys.argv = ["isotrain", *{arguments!r}]
try:
    main()
except SystemExit:
    pass
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


def test_a_mistyped_command_is_named() -> None:
    done = CliRunner().invoke(app, ["trian"])
    assert done.exit_code == 2 and "'train'" in done.output
    done = CliRunner().invoke(app, ["parity", "comparre"])
    assert done.exit_code == 2 and "'compare'" in done.output
