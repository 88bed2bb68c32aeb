"""The tests that docs/devices.md names for its points are there, in both languages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([\w.-]+)\])?`")


@pytest.mark.parametrize("page", ["docs/devices.md", "docs/zh/devices.md"])
def test_every_test_that_is_named_is_there(page: str) -> None:
    named = NAMED.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(named) >= 17
    for file, name, case in named:
        text = (ROOT / file).read_text(encoding="utf-8")
        functions = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
        assert name in functions, (file, name)
        # A case is named in the file, or is a recorded machine.
        assert not case or f'"{case}"' in text or (ROOT / file).with_name("machines").joinpath(case).is_dir()
