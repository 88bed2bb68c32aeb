"""A worker's last words are read from the end of its output, whatever its size."""

from __future__ import annotations

from pathlib import Path

from isotrain.cluster.failures import LAST_BYTES, tail


def test_the_end_of_a_long_file_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "errors"
    path.write_bytes(b"first\n" + b"x" * (4 * LAST_BYTES) + b"\nlast but one\n\xff last\n")
    lines = tail(path)
    assert lines[1:] == ["last but one", "\ufffd last"]
    assert len(lines[0]) < LAST_BYTES
    path.write_text("all\nof it\n")
    assert tail(path) == ["all", "of it"]
