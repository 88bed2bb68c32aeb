"""Shared helpers of the pages that are generated from the source."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def table_row(*cells: str) -> str:
    """One row of a Markdown table, whatever the cells hold."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page_command(module: str, render: Callable[[], str], arguments: Sequence[str] | None = None) -> int:
    """What `python -m module` does; returns its exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("path", type=Path, help="the page to write")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    options = parser.parse_args(arguments)
    page = render()
    if not options.check:
        options.path.write_text(page, encoding="utf-8")
        return 0
    if options.path.is_file() and options.path.read_text(encoding="utf-8") == page:
        return 0
    print(f"{options.path} is out of date: run `{parser.prog} {options.path}`", file=sys.stderr)
    return 1
