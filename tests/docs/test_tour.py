"""Paths and names of docs/tour.md and of CONTRIBUTING's map and walks exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pages
import pytest
from translations import ROOT

SOURCE = ROOT / "src/isotrain"
TOUR = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
WALKS = (
    (ROOT / "CONTRIBUTING.md")
    .read_text(encoding="utf-8")
    .split("## Four walks through the code\n")[1]
    .split("\n## ")[0]
)


def defined(source: Path) -> set[str]:
    """Functions, classes, methods and fields of all files below `source`."""
    names: set[str] = set()
    for file in source.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


NAMES = defined(SOURCE)


@pytest.mark.parametrize("text", [TOUR, WALKS], ids=["tour", "walks"])
def test_files_and_names_exist(text: str) -> None:
    spans = pages.code_spans(text)
    paths = {span for span in spans if re.fullmatch(r"[\w/]+\.py|[\w/]+/", span)} - {"src/isotrain/"}
    # A file beside one that was named stands without its folder.
    missing = [path for path in paths if not (SOURCE / path).exists() and not list(SOURCE.rglob(path))]
    assert len(paths) > 10
    assert missing == []
    # `PolicyRank.learn`, `launch`, `batches.next()`: the last part is a definition of ours.
    named = {
        span.removesuffix("()") for span in spans if re.fullmatch(r"_?[A-Za-z]\w*(?:\.\w+)?(?:\(\))?", span)
    }
    words = {"isotrain", "rollout", "version", "lr", "step", "doctor", "parity", "view"}
    unknown = sorted(name for name in named - paths - words if name.rsplit(".", 1)[-1] not in NAMES)
    assert len(named) > 10
    assert unknown == []


def test_the_tour_is_short() -> None:
    assert len(TOUR.split()) <= 600
