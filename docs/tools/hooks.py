"""Hooks of MkDocs: pages from outside docs/, links between languages, English where Chinese is missing."""

from __future__ import annotations

import json
import os
import posixpath
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pages import indented_for_site, links, with_links
from translations import ENGLISH_ONLY, NOTE, ROOT, chinese_of, english_pages

# Pages of the repository that people read as documents, and their names on the English site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "benchmarks/README.md": "benchmarks.md",
}
LANDING = "index.md"
# Their tables need all the width of a window.
WIDE = ("support-matrix.md", "stacks.md", "model-types.md")
NOT_YET = "> 本页尚无中文版，以下为英文原文。\n\n"


def is_chinese(config: Any) -> bool:
    return bool(config["theme"]["language"] == "zh")


def source_of(page: str, config: Any) -> str:
    """Path in the repository of a page of this site."""
    for source, name in PAGES.items():
        if name == page and not (is_chinese(config) and name != "index.md"):
            return chinese_of(source) if is_chinese(config) else source
    if page.startswith("source/"):
        return page.removeprefix("source/").removesuffix(".md")
    folder = "docs/zh/" if is_chinese(config) else "docs/"
    if is_chinese(config) and f"docs/{page}" in ENGLISH_ONLY:
        return f"docs/{page}"
    return folder + page


def shown(path: str) -> str:
    """A file of the repository as a page: code in a block, a notebook cell by cell, a directory as a list."""
    if (ROOT / path).is_dir():
        entries = sorted(entry.name for entry in (ROOT / path).iterdir() if entry.is_file())
        return f"# {path}\n\n" + "\n".join(f"- [{name}]({name}.md)" for name in entries) + "\n"
    text = (ROOT / path).read_text(encoding="utf-8")
    language = {".py": "python", ".json": "json", ".ipynb": "python"}.get(posixpath.splitext(path)[1], "text")
    if not path.endswith(".ipynb"):
        return f"# {path}\n\n```{language}\n{text.rstrip()}\n```\n"
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return f"# {path}\n\n" + "\n\n".join(
        f"```python\n{source}\n```" if kind == "code" else source.replace("# ", "## ", 1)
        for kind, source in cells
    )


def outside_files() -> set[str]:
    """Paths of files and directories that any page links to and that are no pages themselves."""
    sources = [*PAGES, *english_pages(), *map(chinese_of, english_pages())]
    found = set()
    for source in filter(lambda source: (ROOT / source).exists(), sources):
        for link in links((ROOT / source).read_text(encoding="utf-8")):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link.partition("#")[0]))
            if ":" not in link and not link.startswith("#") and place(target) is None:
                found.add(target)
    for directory in [path for path in found if (ROOT / path).is_dir()]:
        found |= {f"{directory}/{entry.name}" for entry in (ROOT / directory).iterdir() if entry.is_file()}
    return {path for path in found if (ROOT / path).exists()}


def place(path: str) -> tuple[str, str] | None:
    """(site, page of it) of a file of the repository; None if it is no page."""
    if path in PAGES:
        return "en", PAGES[path]
    if path == "README.zh.md":
        return "zh", "index.md"
    if path.startswith("docs/zh/"):
        return "zh", path.removeprefix("docs/zh/")
    if path.startswith("docs/"):
        return "en", path.removeprefix("docs/")
    return None


def page_top(page: Any) -> str:
    """From a page up to the first directory of its site."""
    return "../" * page.url.removeprefix("./").count("/")


def url(page: str) -> str:
    name = page.removesuffix(".md")
    return "" if name == "index" else f"{name}/" if page.endswith(".md") else page


def on_files(files: Files, config: Any) -> Files:
    for name in [*config["extra_css"], *map(str, config["extra_javascript"])]:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / "docs/tools" / name)))
    if is_chinese(config):
        readme = ROOT / "README.zh.md"
        files.append(File.generated(config, "index.md", content=readme.read_text(encoding="utf-8")))
        for page in ENGLISH_ONLY:
            text = (ROOT / page).read_text(encoding="utf-8")
            title, _, rest = text.partition("\n")
            content = f"{title}\n\n{NOT_YET}{rest}"
            files.append(File.generated(config, page.removeprefix("docs/"), content=content))
        for image in sorted((ROOT / "docs/images").iterdir()):
            files.append(File.generated(config, f"images/{image.name}", abs_src_path=str(image)))
        return files
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    for path in sorted(outside_files()):
        name = f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}.md"
        files.append(File.generated(config, name, content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    name = page.file.src_uri
    if name in (LANDING, *WIDE):
        page.meta["hide"] = ["navigation", "toc"]  # the tabs lead on
    if name.startswith("source/") and not name.endswith(".ipynb.md"):
        return markdown
    source = source_of(name, config)
    here = "zh" if is_chinese(config) else "en"
    top = page_top(page)

    def target(link: str) -> str:
        path, mark, fragment = link.partition("#")
        if ":" in link or not path:
            return link
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if path.startswith("docs/images/"):
            return posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(page.file.src_uri) or ".")
        site, name = place(path) or (
            "en",
            f"source/{path}" + ("/index.md" if (ROOT / path).is_dir() else ".md"),
        )
        if not (ROOT / path).exists():
            return link  # MkDocs tells of it
        if site == here or (here == "zh" and path in ENGLISH_ONLY):
            return posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".") + mark + fragment
        return (
            top + ("../" if here == "zh" else "zh/") + url(name.replace("/index.md", ".md")) + mark + fragment
        )

    # The title of a page is its first line only if nothing stands above it.
    lines = [line for line in NOTE.sub("", markdown).splitlines(keepends=True) if not is_switch(line)]
    return indented_for_site(with_links("".join(lines), target))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Classes for site.css: the landing page with its roads as cards, and pages with wide tables."""
    if page.file.src_uri in WIDE:
        return f'<div class="wide">{html}</div>'
    if page.file.src_uri != LANDING:
        return html
    roads, end, rest = html.partition("</table>")
    return f'<div class="landing">{roads.replace("<table>", """<table class="roads">""", 1)}{end}{rest}</div>'


def is_switch(line: str) -> bool:
    """Whether the line only leads to the other language, which the site has in its header."""
    return line.startswith("[中文](") or (line.startswith("[English](") and line.rstrip().endswith(")"))


def on_config(config: Any) -> Any:
    # MkDocs would cut links that leave the site; `on_post_page` puts the right ones here.
    languages = {"English": "en", "中文": "zh"}
    config["extra"]["alternate"] = [
        {"name": name, "lang": code, "link": f"#language-{code}"} for name, code in languages.items()
    ]
    if os.environ.get("DOCS_VERSION"):
        config["extra"]["version"] = {"provider": "mike"}  # as publish.py writes versions
    return config


def on_post_page(output: str, page: Any, config: Any) -> str:
    """The header's switch of languages leads to the same page; the English site alone has all pages."""
    both = {url("index.md"), *(url(name.removeprefix("docs/")) for name in english_pages())}
    here = page.url.removeprefix("./")
    same = here if here in both else ""
    english = page_top(page) + ("../" if is_chinese(config) else "")
    for code, link in {"en": english + same, "zh": f"{english}zh/{same}"}.items():
        output = output.replace(f'"#language-{code}"', f'"{link or "./"}"')
    return output


def on_pre_build(config: Any) -> None:
    # Each build would otherwise write the time of day, and equal pages would differ.
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")
    Path(config["site_dir"]).parent.mkdir(parents=True, exist_ok=True)
