"""Builds the site in both languages and follows every link of the result: `python docs/tools/build.py`."""

from __future__ import annotations

import html.parser
import logging
import posixpath
import sys
import urllib.parse
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).resolve().parents[2]
# What a browser fetches by itself; a link to another host is only followed by a reader.
FETCHED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


class Page(html.parser.HTMLParser):
    """Ids, links and fetched files of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[tuple[str, bool]] = []
        self.languages: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "a" and given.get("hreflang"):
            self.languages[given["hreflang"] or ""] = given.get("href") or ""
        for name, value in attributes:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.links.append((value, (tag, name) in FETCHED))


def problems(site: Path) -> list[str]:
    """Links of the built site that lead nowhere, and files that it would fetch from other hosts."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are absolute, for a site at the root of its host
        if path.is_relative_to(site / "zh"):
            other = posixpath.normpath(path.parent / page.languages.get("en", "")) + "/index.html"
            if Path(other) != site / path.relative_to(site / "zh"):
                found.append(f"{path.relative_to(site)}: no switch to the same page in English")
        for link, fetched in page.links:
            address = urllib.parse.urlparse(link)
            if address.scheme or address.netloc:
                if fetched:
                    found.append(f"{path.relative_to(site)}: fetches {link}")
                continue
            target = path
            if address.path:
                target = Path(posixpath.normpath(path.parent / urllib.parse.unquote(address.path)))
                target = target / "index.html" if target.is_dir() else target
            ids = pages[target].ids if target in pages else set()
            if not target.is_file():
                found.append(f"{path.relative_to(site)}: no {link}")
            elif address.fragment and urllib.parse.unquote(address.fragment) not in {*ids, "__skip"}:
                found.append(f"{path.relative_to(site)}: no place {link}")
    return found


class Warnings(logging.Handler):
    """Counts what `mkdocs build --strict` refuses, and lets it go on to the next."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1
        print(record.getMessage(), file=sys.stderr)


def main() -> int:
    warnings = Warnings()
    logging.getLogger("mkdocs").addHandler(warnings)
    # English first: it empties the directory that the other one is in.
    for config in ("mkdocs.yml", "mkdocs.zh.yml"):
        build(load_config(config_file=str(ROOT / config)))
    found = problems(ROOT / "site")
    print("\n".join(found), file=sys.stderr)
    print(f"site: {len(list((ROOT / 'site').rglob('*.html')))} pages, {warnings.count + len(found)} problems")
    return bool(warnings.count or found)


if __name__ == "__main__":
    sys.exit(main())
