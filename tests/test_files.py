"""Files of run directories from somebody else: what is opened, what is not, and how deep JSON may be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from isotrain.files import DEEPEST_JSON, open_own, open_regular, parse_json, read_regular

# What waits for a pipe or reads a device to its end fails, and does not stop the suite.
pytestmark = pytest.mark.timeout(20)


NO_FILES: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_regular_file_is_neither_read_nor_written(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    NO_FILES[kind](path)
    with pytest.raises(OSError):
        open_regular(path)
    for mode in ("wb", "ab"):
        with pytest.raises(OSError) as caught:
            open_own(path, mode)
        assert caught.value.strerror


@pytest.mark.parametrize("mode", ["wb", "ab"])
@pytest.mark.parametrize("exists", [True, False])
def test_links_are_not_written_through(tmp_path: Path, mode: str, exists: bool) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    if exists:
        target.write_text("precious")
    link.symlink_to(target)
    with pytest.raises(OSError, match="a link, which is not followed"):
        open_own(link, mode)
    assert target.exists() == exists and (not exists or target.read_text() == "precious")


def test_plain_files_are_written_emptied_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for mode, expected in (("ab", b"x"), ("ab", b"xx"), ("wb", b"x")):
        with open_own(path, mode) as file:
            file.write(b"x")
        assert path.read_bytes() == expected == read_regular(path, 2)
    (tmp_path / "link").symlink_to(path)
    assert read_regular(tmp_path / "link") == b"x", "reading follows links"
    with pytest.raises(OSError, match="larger than 0 bytes"):
        read_regular(path, 0)


def nested(levels: int, kind: str) -> str:
    return "[" * levels + "]" * levels if kind == "list" else '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize("kind", ["list", "object"])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_deep_json_is_a_value_error(kind: str, as_bytes: bool) -> None:
    def data(levels: int) -> bytes | str:
        return nested(levels, kind).encode() if as_bytes else nested(levels, kind)

    assert parse_json(data(DEEPEST_JSON)) == json.loads(data(DEEPEST_JSON))
    for levels in (DEEPEST_JSON + 1, 990, 200_000):
        with pytest.raises(ValueError, match="nested"):
            parse_json(data(levels))
    wide = json.dumps([[1], {"a": [2]}] * 500)
    assert parse_json(wide) == json.loads(wide)
