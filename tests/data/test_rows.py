from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from isotrain.data import rows as module
from isotrain.data.rows import Row, first_row, read_rows, source_digest
from isotrain.errors import DataError


def write_lines(path: Path, values: list[object]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def test_json_lines_know_their_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n  {"text": "zw\xc3\xb6lf"}')
    assert list(read_rows(str(file))) == [
        Row({"text": "one"}, f"{file}:1"),
        Row({"text": "zwölf"}, f"{file}:3"),
    ]


def test_json_holds_lines_or_one_array(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "lines.json", [{"text": "a"}, {"text": "b"}])
    array = tmp_path / "array.json"
    array.write_text('\n[\n {"text": "a"},\n {"text": "b"}\n]\n')
    assert [row.values for row in read_rows(str(lines))] == [row.values for row in read_rows(str(array))]
    assert [row.origin for row in read_rows(str(array))] == [f"{array} row 0", f"{array} row 1"]


def test_parquet_drops_the_nulls_that_arrow_adds(tmp_path: Path) -> None:
    values = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]},
    ]
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), file)
    read = list(read_rows(str(file)))
    assert [row.origin for row in read] == [f"{file} row 0", f"{file} row 1"]
    assert read[0].values == values[0]
    assert read[1].values == {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}


def test_directories_and_lists_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    write_lines(tmp_path / "part" / "2.jsonl", [{"text": "2"}])
    write_lines(tmp_path / "part" / "1.jsonl", [{"text": "1"}])
    (tmp_path / "part" / "notes.txt").write_text("not data")
    last = write_lines(tmp_path / "0.jsonl", [{"text": "0"}])
    rows = read_rows([str(tmp_path / "part"), str(last)])
    assert [row.values["text"] for row in rows] == ["1", "2", "0"]
    assert [row.values["text"] for row in rows] == ["1", "2", "0"], "rows can be read again"


def test_rows_are_read_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\nbroken\n')
    rows = iter(read_rows(str(file)))
    assert next(rows).values == {"text": "fine"}
    with pytest.raises(DataError, match=r"a\.jsonl:2: broken JSON at column 1"):
        next(rows)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a",}', r":1: broken JSON at column 1[34]: "),
        (b'{"text": "\xff"}', r":1: byte 11 is not UTF-8"),
        (b"[1, 2]", r":1: a row must be a JSON object, not a list"),
        (b"null", r":1: a row must be a JSON object, not null"),
        (b'{"text": "\\ud83d"}', r":1: a lone .* escape"),
        (b'{"n": ' + b"9" * 5000 + b"}", r":1: JSON that cannot be read"),
        (b'{"a": ' + b"[" * 100_000, r":1: JSON that cannot be read"),
    ],
)
def test_broken_lines(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(line + b"\n")
    with pytest.raises(DataError, match=message):
        list(read_rows(str(file)))


def test_surrogate_pairs_are_whole_characters(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "\\ud83d\\ude42"}\n')
    assert [row.values for row in read_rows(str(file))] == [{"text": "🙂"}]


def test_broken_array_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('[\n {"text": "a"},\n {"text": }\n]')
    with pytest.raises(DataError, match=r"a\.json: broken JSON at line 3, column 11"):
        list(read_rows(str(file)))


def test_broken_parquet(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match=r"a\.parquet: broken Parquet"):
        list(read_rows(str(file)))


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_rows(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="no such file"):
        read_rows("./none")
    with pytest.raises(DataError, match=r"the directory has no \.jsonl"):
        read_rows(str(tmp_path))
    (tmp_path / "a.xlsx").write_text("a,b")
    with pytest.raises(DataError, match=r"convert it to \.jsonl, \.parquet or \.csv"):
        read_rows(str(tmp_path / "a.xlsx"))
    with pytest.raises(DataError, match="no data given"):
        read_rows([])


def test_the_first_row_of_a_hub_is_not_looked_for() -> None:
    for name in ("org/set", "org/set@refs/convert/parquet", "org/set:train[:50%] + test", "set:main:train"):
        assert first_row(name) is None
    for name in ("a/b/none.jsonl", "no set", "-x"):
        with pytest.raises(DataError, match="no such file"):
            first_row(name)


class TestHub:
    def test_name_config_and_split(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def load_dataset(
            name: str, config: str | None, split: str, revision: str | None
        ) -> list[dict[str, object]]:
            asked.append((name, config, split, revision))
            return [{"text": "a", "other": None}]

        monkeypatch.setattr("datasets.load_dataset", load_dataset)
        for name in ("org/set", "org/set:test", "org/set@v1:main:test"):
            assert list(read_rows(name)) == [Row({"text": "a"}, f"{name} row 0")]
        assert asked == [
            ("org/set", None, "train", None),
            ("org/set", None, "test", None),
            ("org/set", "main", "test", "v1"),
        ]
        with pytest.raises(DataError, match="name:config:split"):
            list(read_rows("a:b:c:d"))

    def test_unknown_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def load_dataset(*arguments: object, **options: object) -> None:
            raise ConnectionError("cannot reach it\nlong explanation")

        monkeypatch.setattr("datasets.load_dataset", load_dataset)
        with pytest.raises(DataError, match=r"org/set is neither a local file .* \(cannot reach it long"):
            list(read_rows("org/set"))

    def test_digest_is_of_the_downloaded_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Downloaded:
            cache_files = ({"filename": str(tmp_path / "a.arrow")},)

        monkeypatch.setattr("datasets.load_dataset", lambda *arguments, **options: Downloaded)
        (tmp_path / "a.arrow").write_bytes(b"rows")
        before = source_digest("org/set")
        (tmp_path / "a.arrow").write_bytes(b"other rows")
        assert source_digest("org/set") != before

    def test_package_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(DataError, match=r"pip install '\.\[hub\]' in a clone of isotrain"):
            list(read_rows("org/set"))


def test_digest_is_of_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 5)
    a = write_lines(tmp_path / "a.jsonl", [{"text": "some text"}])
    b = write_lines(tmp_path / "b.jsonl", [{"text": "some text"}])
    c = write_lines(tmp_path / "c.jsonl", [{"text": "some texT"}])
    assert source_digest(str(a)) == source_digest([str(b)]) != source_digest(str(c))
    assert source_digest([str(a), str(c)]) != source_digest([str(c), str(a)])
    assert len(source_digest(str(a))) == 64


def test_csv(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes('\ufeffprompt,completion\n"2, 3?","a\nb"\n\n答,ok\n'.encode())
    rows = list(read_rows(str(file)))
    assert [dict(row.values) for row in rows] == [
        {"prompt": "2, 3?", "completion": "a\nb"},
        {"prompt": "答", "completion": "ok"},
    ]
    assert [row.origin for row in rows] == [f"{file}:3", f"{file}:5"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"a,b\n1,2,3\n", "rows.csv:2: 3 values for 2 columns; quote a text that has a comma"),
        (b"a,b\n1\n", "rows.csv:2: 1 values for 2 columns"),
        (b"a,a\n1,2\n", "rows.csv:1: the first line must name the columns, each once"),
        (b"a,\n1,2\n", "rows.csv:1: the first line must name the columns, each once"),
        (b'a,b\n"1" x,2\n', "rows.csv:2: broken CSV"),
        (b"a,b\n\xff,2\n", "rows.csv: not UTF-8 text"),
    ],
)
def test_csv_that_is_wrong(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "rows.csv").write_bytes(text)
    with pytest.raises(DataError, match=re.escape(said)):
        list(read_rows(str(tmp_path / "rows.csv")))
