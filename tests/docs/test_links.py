"""Links between the documents, as a Git host follows them, and the order of the site's pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pages
import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from translations import ROOT

DOCUMENTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("docs/zh/*.md"),
    ROOT / "benchmarks/README.md",
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Any) -> None:
    text = path.read_text(encoding="utf-8")
    for link in pages.links(text):
        target, _, fragment = link.partition("#")
        if ":" in link:
            continue
        file = path.parent / target if target else path
        assert file.exists(), link
        if fragment:
            # Exactly one: hosts number headings of the same name in different ways.
            assert pages.anchors(file.read_text(encoding="utf-8")).count(fragment) == 1, link


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_emphasis_and_links_are_seen_as_such(path: Any) -> None:
    """Beside Chinese punctuation, Git hosts take two stars for stars where the site's renderer does not."""
    left = [
        text
        for text in texts(MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8")))
        if "**" in text or "](" in text
    ]
    assert left == []


def texts(tokens: Iterable[Token]) -> Iterator[str]:
    for token in tokens:
        if token.type == "text":
            yield token.content
        yield from texts(token.children or [])


def nav(name: str) -> list[dict[str, list[str]]]:
    """Without the rest of the file, which has tags of MkDocs."""
    found: list[dict[str, list[str]]] = yaml.safe_load((ROOT / name).read_text().partition("\nnav:\n")[2])
    return found


def listed(name: str) -> Iterator[str]:
    for section in nav(name):
        for entries in section.values():
            yield from entries


def test_the_site_lists_every_page_in_the_same_order_in_both_languages() -> None:
    english, chinese = list(listed("mkdocs.yml")), list(listed("mkdocs.zh.yml"))
    assert {path.name for path in ROOT.glob("docs/*.md")} <= set(english)
    assert chinese == english[: len(chinese)]
    assert english[len(chinese) :] == ["benchmarks.md", "contributing.md", "changelog.md", "security.md"]


def test_lists_in_lists_and_their_code_are_indented_for_the_site() -> None:
    text = "1. One:\n\n   ```bash\n   a\n     b\n   ```\n\n   - two\n2. Three\n\n```\n  - as it is\n```\n"
    expected = (
        "1. One:\n\n    ```bash\n    a\n      b\n    ```\n\n    - two\n2. Three\n\n```\n  - as it is\n```\n"
    )
    assert pages.indented_for_site(text) == expected


def test_what_is_read_in_a_page() -> None:
    text = "# `a` and [b](c.md#d)!\n\n`x y`, 1,966 and 3.0e-07, [2](e3.md)\n\n```\n[no](link) 4\n```\n"
    text += "\n| a \\| b | c |\n"
    assert pages.links(text) == ["c.md#d", "e3.md"]
    assert pages.anchors(text) == ["a-and-b"]
    assert pages.anchor("模拟 NPU：设备") == "模拟-npu设备"
    assert pages.code_spans(text) == {"a", "x y"}
    assert pages.numbers(text) == {"1,966", "3.0e-07", "2"}
    assert pages.code_blocks(text) == ["```\n[no](link) 4\n```\n"]
    assert pages.table_rows(text) == [2]
    assert pages.with_links(text, str.upper).count("C.MD#D") == 1
