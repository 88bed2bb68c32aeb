"""The pictures of docs/architecture.md are their script's, and its arrows, paths and sizes are real."""

from __future__ import annotations

import re
from typing import get_args, get_type_hints

import figures
import numpy as np
import pages
import pytest
from translations import ROOT

from isotrain.data.items import _TOKEN_FILES
from isotrain.data.trajectory import Trajectory

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_pictures_are_drawn_by_the_script() -> None:
    drawn = figures.pictures()
    assert {path.name for path in figures.IMAGES.glob("*.svg")} == drawn.keys()
    for name, text in drawn.items():
        assert (figures.IMAGES / name).read_text(encoding="utf-8") == text, "python docs/tools/figures.py"


@pytest.mark.parametrize(
    ("picture", "heading"),
    [("architecture-sft", "## A supervised step"), ("architecture-online", "## An online step")],
)
def test_each_arrow_of_a_picture_has_a_row(picture: str, heading: str) -> None:
    section = PAGE.split(f"{heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|", section, re.MULTILINE)
    for ending in ("", "-zh"):
        drawn = figures.pictures()[f"{picture}{ending}.svg"]
        arrows = re.findall(r'class="number"[^>]*>(\d+)<', drawn)
        assert sorted(arrows, key=int) == rows


def test_paths_exist() -> None:
    spans = [span for span in pages.code_spans(PAGE) if re.fullmatch(r"[\w/]+(?:\.py|/)|tests/[\w/]+", span)]
    assert len(spans) > 25
    assert [
        span for span in spans if not any((at / span).exists() for at in (ROOT, ROOT / "src/isotrain"))
    ] == []


def test_bytes_of_a_token() -> None:
    hints = get_type_hints(Trajectory)
    sizes = {
        name: np.dtype(get_args(get_args(kind)[1])[0]).itemsize
        for name, kind in hints.items()
        if name[-2:] in ("_T", "_N")
    }
    response = sum(sizes.values())
    assert f"{sizes['tokens_T']} bytes per prompt token, {response} per response token" in PAGE
    stored = sum(np.dtype(kind).itemsize for kind in _TOKEN_FILES.types.values())
    assert f"{stored} bytes per token (id and mask)" in PAGE
