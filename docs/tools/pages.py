"""What the documents' tools read in a Markdown page: links, headings, code, tables, figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

FENCE = re.compile(r"^( *)```")
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*(?:e[+-]?\d+)?")


def parts(text: str) -> Iterator[tuple[bool, str]]:
    """The page in order: (whether it is a fenced block, its text)."""
    fenced, lines = False, list[str]()
    for line in text.splitlines(keepends=True):
        if not FENCE.match(line):
            lines.append(line)
        elif fenced:
            yield True, "".join([*lines, line])
            fenced, lines = False, []
        else:
            yield False, "".join(lines)
            fenced, lines = True, [line]
    yield fenced, "".join(lines)


def prose(text: str) -> str:
    return "".join(part for fenced, part in parts(text) if not fenced)


def code_blocks(text: str) -> list[str]:
    return [part for fenced, part in parts(text) if fenced]


def code_spans(text: str) -> set[str]:
    """Inline code, with the line breaks of the paragraph as spaces."""
    return {" ".join(found[1].split()) for found in CODE.findall(prose(text))}


def numbers(text: str) -> set[str]:
    """Figures of the prose; those of links and of code are compared as such."""
    return set(NUMBER.findall(LINK.sub("", CODE.sub("", prose(text)))))


def links(text: str) -> list[str]:
    return LINK.findall(CODE.sub("", prose(text)))


def with_links(text: str, change: Callable[[str], str]) -> str:
    """The page with `change` of each link's target in its place."""
    return "".join(
        part if fenced else LINK.sub(lambda found: change(found[1]), part) for fenced, part in parts(text)
    )


def headings(text: str) -> list[tuple[int, str]]:
    """(level, title) of each."""
    return [(len(marks), title) for marks, title in re.findall(r"^(#+) (.+)$", prose(text), re.MULTILINE)]


def anchor(title: str) -> str:
    """As Git hosts and the site's `slugify` make it."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def anchors(text: str) -> list[str]:
    return [anchor(title) for _, title in headings(text)]


def table_rows(text: str) -> list[int]:
    """Cells of each row of every table."""
    rows = re.findall(r"^\|.*\|$", CODE.sub("", prose(text)), re.MULTILINE)
    return [row.replace("\\|", "").count("|") - 1 for row in rows]


def table_heads(text: str) -> list[list[str]]:
    """The names of each table's columns."""
    found = re.findall(r"^\|(.*)\|\n\|(?:-+\|)+$", prose(text), re.MULTILINE)
    return [[name.strip() for name in row.split("|")] for row in found]


def indented_for_site(text: str) -> str:
    """Lists inside lists, and code in them, with the four spaces that the site's renderer asks for."""
    done = ""
    for fenced, part in parts(text):
        if not fenced:
            done += re.sub(r"^ {1,3}(?=(?:[-*]|\d+\.) )", "    ", part, flags=re.MULTILINE)
        elif part.startswith(" "):
            missing = max(4 - (len(part) - len(part.lstrip(" "))), 0)
            done += re.sub(r"^(?=.)", " " * missing, part, flags=re.MULTILINE)
        else:
            done += part
    return done
