#!/usr/bin/env python3
"""Tells which Chinese pages are behind: `python docs/tools/translations.py [--seen PAGE ...]`.

The first line of a Chinese page has the digest of the English page that it says. When the English page has
changed, bring the Chinese one up to date and run this with `--seen PAGE`, such as `--seen docs/ascend.md`.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Made from the code, with messages in English: the Chinese page is an introduction to them, without a digest.
GENERATED = ("docs/recipe-reference.md", "docs/stacks.md", "docs/support-matrix.md")
# Shown in English on the Chinese site.
ENGLISH_ONLY: tuple[str, ...] = ("docs/model-types.md",)
NOTE = re.compile(r"\A<!-- (\S+) sha256:([0-9a-f]{64}) -->\n")


def english_pages() -> list[str]:
    """Paths in the repository of all pages that are read in two languages."""
    return ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def chinese_of(page: str) -> str:
    return "README.zh.md" if page == "README.md" else page.replace("docs/", "docs/zh/", 1)


def digest(page: str) -> str:
    return hashlib.sha256((ROOT / page).read_bytes()).hexdigest()


def problem(page: str) -> str | None:
    """What is wrong with the Chinese page of this English one; None if nothing is."""
    path = ROOT / chinese_of(page)
    if page in ENGLISH_ONLY:
        return f"{chinese_of(page)} exists: remove {page} from ENGLISH_ONLY" if path.exists() else None
    if not path.exists():
        return f"{page} has no {chinese_of(page)}: write it, or list the page in ENGLISH_ONLY"
    if page in GENERATED:
        return None
    note = NOTE.match(path.read_text(encoding="utf-8"))
    if note is None or note[1] != page:
        return f"{chinese_of(page)} does not say which page it translates: run with --seen {page}"
    if note[2] != digest(page):
        return f"{page} has changed: bring {chinese_of(page)} up to date, then run with --seen {page}"
    return None


def renew(page: str) -> None:
    path = ROOT / chinese_of(page)
    text = NOTE.sub("", path.read_text(encoding="utf-8"))
    path.write_text(f"<!-- {page} sha256:{digest(page)} -->\n{text}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--seen", nargs="+", default=[], metavar="PAGE", help="English pages that were looked at"
    )
    for page in parser.parse_args().seen:
        if page not in english_pages() or page in (*GENERATED, *ENGLISH_ONLY):
            parser.error(f"{page} is no page with a digest, such as docs/ascend.md")
        renew(page)
    problems = [found for page in english_pages() if (found := problem(page))]
    print("\n".join([*problems, *(f"{page} is in English only" for page in ENGLISH_ONLY)]))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
