"""The Chinese pages say what the English ones say, and someone has looked at them since."""

from __future__ import annotations

import re
from pathlib import Path

import pages
import pytest
import translations
from translations import ENGLISH_ONLY, GENERATED, ROOT, chinese_of, english_pages

TRANSLATED = [page for page in english_pages() if page not in (*GENERATED, *ENGLISH_ONLY)]


def both(page: str) -> tuple[str, str]:
    english, chinese = (
        without_switch((ROOT / name).read_text(encoding="utf-8")) for name in (page, chinese_of(page))
    )
    return english, chinese


def without_switch(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("[中文](", "[English](", "<!-- ")))


@pytest.mark.parametrize("page", english_pages())
def test_every_page_has_a_chinese_one_of_its_present_state(page: str) -> None:
    assert (found := translations.problem(page)) is None, found


def test_chinese_pages_have_english_ones() -> None:
    chinese = {f"docs/zh/{path.name}" for path in (ROOT / "docs/zh").glob("*.md")}
    assert chinese <= {chinese_of(page) for page in english_pages()}
    assert {*ENGLISH_ONLY, *GENERATED} <= set(english_pages())


@pytest.mark.parametrize("page", TRANSLATED)
def test_both_languages_have_the_same_code_and_figures(page: str) -> None:
    english, chinese = both(page)
    blocks = [pages.code_blocks(text) for text in (english, chinese)]
    assert len(blocks[0]) == len(blocks[1])
    for said, there in zip(*blocks, strict=True):
        if there != said:  # what `--lang zh` prints, with the same figures; each page's own test runs it
            assert there.startswith("```text\n") and said.startswith("```text\n")
            assert re.search("[\u4e00-\u9fff]", there), there
            assert set(pages.NUMBER.findall(said)) <= set(pages.NUMBER.findall(there))
    assert pages.code_spans(chinese) == pages.code_spans(english)
    assert pages.numbers(english) <= pages.numbers(chinese)


@pytest.mark.parametrize("page", TRANSLATED)
def test_both_languages_have_the_same_parts(page: str) -> None:
    english, chinese = both(page)
    levels = [[level for level, _ in pages.headings(text)] for text in (english, chinese)]
    assert levels[0] == levels[1]
    assert pages.table_rows(chinese) == pages.table_rows(english)
    assert leads_to(chinese, chinese_of(page)) == leads_to(english, page)


def leads_to(text: str, page: str) -> set[str]:
    """Where the page's links lead, with Chinese pages as their English ones, and without places in pages."""
    chinese = {chinese_of(name): name for name in english_pages()}
    found = set()
    for link in pages.links(text):
        path = link.partition("#")[0] if ":" not in link else link
        if path and ":" not in path:
            path = str((ROOT / page).parent.joinpath(path).resolve().relative_to(ROOT))
            path = path.replace("-zh.svg", ".svg")  # a picture with words has one of its own
        found.add(chinese.get(path, path))
    return found - {page, ""}


@pytest.mark.parametrize("page", [page for page in english_pages() if page not in ENGLISH_ONLY])
def test_the_two_pages_lead_to_each_other(page: str) -> None:
    for here, there in ((page, chinese_of(page)), (chinese_of(page), page)):
        at = (ROOT / here).parent
        assert any(
            at.joinpath(link).resolve() == ROOT / there
            for link in pages.links((ROOT / here).read_text(encoding="utf-8"))
        )


@pytest.mark.parametrize("page", GENERATED)
def test_the_introduction_to_a_generated_page_leads_to_all_its_parts_and_names_its_columns(page: str) -> None:
    english, chinese = both(page)
    parts = {f"../{Path(page).name}#{name}" for name in pages.anchors(english)[1:]}
    assert parts <= set(pages.links(chinese))
    columns = {name for row in pages.table_heads(english) for name in row} - {""}
    assert columns and [name for name in columns if name not in chinese] == []


def test_a_changed_page_is_noticed_until_it_was_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    monkeypatch.setattr(translations, "ENGLISH_ONLY", ("docs/b.md",))
    (tmp_path / "docs/zh").mkdir(parents=True)
    (tmp_path / "docs/a.md").write_text("# A\n")
    (tmp_path / "docs/b.md").write_text("# B\n")
    assert translations.problem("docs/a.md") == (
        "docs/a.md has no docs/zh/a.md: write it, or list the page in ENGLISH_ONLY"
    )
    assert translations.problem("docs/b.md") is None
    (tmp_path / "docs/zh/a.md").write_text("# 甲\n", encoding="utf-8")
    assert "does not say which page" in str(translations.problem("docs/a.md"))
    translations.renew("docs/a.md")
    assert translations.problem("docs/a.md") is None
    (tmp_path / "docs/a.md").write_text("# A, changed\n")
    assert "docs/a.md has changed" in str(translations.problem("docs/a.md"))
    translations.renew("docs/a.md")
    assert translations.problem("docs/a.md") is None
    assert (tmp_path / "docs/zh/a.md").read_text(encoding="utf-8").count("<!--") == 1
    (tmp_path / "docs/zh/b.md").write_text("# 乙\n", encoding="utf-8")
    assert translations.problem("docs/b.md") == "docs/zh/b.md exists: remove docs/b.md from ENGLISH_ONLY"
