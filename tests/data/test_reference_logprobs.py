from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isotrain.data.reference_logprobs import ReferenceLogProbs, make_table, table_path
from isotrain.errors import DataError


def test_rows_are_shared_and_kept(tmp_path: Path) -> None:
    path = table_path(tmp_path / "cache", {"model": "a"})
    make_table(path, 5)
    table, other = ReferenceLogProbs(path, 5), ReferenceLogProbs(path, 5)
    assert not table.known().any()
    table.put([3, 1], np.array([[-1.5, -2], [-3, -4]], np.float32))
    assert other[[1, 3]].tolist() == [[-3, -4], [-1.5, -2]], "another process of the machine sees them"
    table.flush()
    make_table(path, 5)
    assert ReferenceLogProbs(path, 5).known().tolist() == [False, True, False, True, False]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_what_is_not_known_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "table.f32"
    make_table(path, 3)
    with pytest.raises(DataError, match=r"table\.f32 lacks log-probs of some items; delete it"):
        ReferenceLogProbs(path, 3)[[0]]
    half = np.memmap(path, "<f4", mode="r+", shape=(3, 2))
    half[1, 0] = -1.0
    half.flush()
    assert not ReferenceLogProbs(path, 3).known().any(), "half a row is none"


def test_another_identity_is_another_file(tmp_path: Path) -> None:
    assert table_path(tmp_path, {"model": "a"}) != table_path(tmp_path, {"model": "b"})
    assert table_path(tmp_path, {"a": 1, "b": 2}) == table_path(tmp_path, {"b": 2, "a": 1})


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "table.f32"
    make_table(path, 3)
    with pytest.raises(DataError, match=r"24 bytes do not fit 4 items; delete it"):
        ReferenceLogProbs(path, 4)
    with pytest.raises(DataError, match="cannot be used"):
        ReferenceLogProbs(tmp_path / "missing.f32", 3)


def test_no_place_for_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"set algorithm\.reference=live"):
        make_table(tmp_path / "file" / "table.f32", 3)
