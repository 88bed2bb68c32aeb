"""The three reports of the docs, from the example that makes them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from isotrain.tools.parity.protocol import verdict_on
from isotrain.tools.parity.verdict import outcome_words

ROOT = Path(__file__).parents[4]


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parity_reports", ROOT / "examples" / "parity_reports.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["equivalent", "different", "inconclusive"])
def test_the_page_says_what_the_report_says(tmp_path: Path, name: str) -> None:
    module = example()
    here, there = (module.write(tmp_path / f"{i}.csv", curve) for i, curve in enumerate(module.CASES[name]))
    verdict = verdict_on(here, there, free_running=True)
    assert verdict.outcome.verdict == name
    page = (ROOT / "docs" / "parity-verdict.md").read_text(encoding="utf-8")
    said = " ".join(page.replace("> ", "").split())
    assert outcome_words(verdict).partition(". ")[2] in said
