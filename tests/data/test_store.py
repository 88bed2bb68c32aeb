from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import chat_templates as styles
import numpy as np
import pytest
from encoders import Encoding

from isotrain.data import tokenise as module
from isotrain.data.encode import Encoder
from isotrain.data.items import SAMPLES, Item, Sample
from isotrain.data.rows import Row
from isotrain.data.store import SampleStore, store_key
from isotrain.data.tokenise import RowProgress, cached_store
from isotrain.errors import DataError


def rows(*lengths: int) -> list[Row]:
    return [Row({"length": length}, f"a:{number}") for number, length in enumerate(lengths, start=1)]


def encode(row: Row) -> list[Item]:
    length = row.values["length"]
    if length == 0:
        return []
    tokens = np.arange(length, dtype=np.int32) + 70_000
    return [Item((Sample(tokens, tokens % 2 == 0),))]


build_store = partial(module.build_store, encoder=Encoding(SAMPLES, encode))


def test_samples_come_back(tmp_path: Path) -> None:
    store = build_store(rows(3, 0, 1, 5), directory=tmp_path / "s", key="key")
    assert len(store) == 3 and store.meta["rows"] == 4 and store.meta["dropped"] == 1
    assert store.tokens == 9 and store.meta["loss_tokens"] == 6
    assert store.lengths.tolist() == [3, 1, 5] and store.lengths.dtype == np.int64
    (sample,) = store[2].samples
    assert sample.tokens_T.tolist() == [70000, 70001, 70002, 70003, 70004]
    assert sample.mask_T.tolist() == [True, False, True, False, True]
    assert sample.tokens_T.dtype == np.int32 and sample.mask_T.dtype == np.bool_
    assert sample.tokens_T.flags.writeable
    with pytest.raises(IndexError):
        store[3]


def test_files_and_digest(tmp_path: Path) -> None:
    store = build_store(rows(2, 1), directory=tmp_path / "s", key="key")
    names = ("tokens.bin", "mask.bin", "offsets.bin")
    sums = b"".join(hashlib.sha256((tmp_path / "s" / name).read_bytes()).digest() for name in names)
    assert store.digest == hashlib.sha256(sums).hexdigest()
    assert np.fromfile(tmp_path / "s" / "offsets.bin", "<i8").tolist() == [0, 2, 3]
    meta = json.loads((tmp_path / "s" / "meta.json").read_text())
    assert meta["key"] == "key" and meta["rows"] == 2 and meta["digest"] == store.digest
    other = build_store(rows(1, 2), directory=tmp_path / "t", key="key")
    assert other.digest != store.digest, "the same tokens in other samples are other data"


def test_progress_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ROWS", 2)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    (tmp_path / "a.jsonl").write_text("{}\n" * 5)
    told: list[str] = []
    progress = RowProgress(str(tmp_path / "a.jsonl"), told.append)
    build_store(rows(1, 0, 1, 1, 1), directory=tmp_path / "s", key="key", progress=progress)
    assert [re.findall(r"(\d) rows, (\d+)%, .* rows/s", line) for line in told] == [
        [("2", "40")],
        [("4", "80")],
        [("5", "100")],
    ]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[Row]:
        yield from rows(1, 2)
        raise DataError("a:3: broken")

    with pytest.raises(DataError, match="a:3: broken"):
        build_store(failing(), directory=tmp_path / "s", key="key")
    with pytest.raises(DataError, match="no samples: 2 of 2 rows were dropped"):
        build_store(rows(0, 0), directory=tmp_path / "s", key="key")
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_builders_wins(tmp_path: Path) -> None:
    def meanwhile() -> Iterator[Row]:
        yield from rows(1, 2)
        build_store(rows(1, 2), directory=tmp_path / "s", key="first")

    store = build_store(meanwhile(), directory=tmp_path / "s", key="second")
    assert len(store) == 2
    assert json.loads((tmp_path / "s" / "meta.json").read_text())["key"] == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("damage", ["short", "missing", "broken", "empty", "bounds", "figures"])
def test_damaged_stores_are_not_opened(tmp_path: Path, damage: str) -> None:
    build_store(rows(2, 2), directory=tmp_path / "s", key="key")
    if damage == "short":
        (tmp_path / "s" / "mask.bin").write_bytes(b"\0")
    elif damage == "missing":
        (tmp_path / "s" / "offsets.bin").unlink()
    elif damage == "bounds":
        np.array([0, -2, 4], "<i8").tofile(tmp_path / "s" / "offsets.bin")
    elif damage == "figures":
        meta = json.loads((tmp_path / "s" / "meta.json").read_text())
        del meta["loss_tokens"]
        (tmp_path / "s" / "meta.json").write_text(json.dumps(meta))
    else:
        (tmp_path / "s" / "meta.json").write_text("{" if damage == "broken" else "{}")
    with pytest.raises(DataError, match="delete"):
        SampleStore(tmp_path / "s", SAMPLES)


class TestCache:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        file = tmp_path / "a.jsonl"
        messages = [{"role": "user", "content": "Capital?"}, {"role": "assistant", "content": "Paris"}]
        file.write_text((json.dumps({"messages": messages}) + "\n") * 3)
        return file

    @pytest.fixture
    def make_encoder(self, make_tokenizer: Callable[..., Any]) -> Callable[..., Encoder]:
        def make(template: str = styles.CHATML, max_length: int = 100) -> Encoder:
            tokenizer = make_tokenizer(template, eos="<|im_end|>")
            return Encoder(tokenizer, "auto", "prompt", "completion", max_length, "error")

        return make

    def test_builds_once(
        self,
        tmp_path: Path,
        source: Path,
        make_encoder: Callable[..., Encoder],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        root = tmp_path / "cache"
        first = cached_store(str(source), make_encoder(), root)
        monkeypatch.setattr(module, "build_store", None)
        second = cached_store([str(source)], make_encoder(), root)
        assert first.directory == second.directory and first.digest == second.digest and len(second) == 3

    def test_the_key_changes_with_all_that_matters(
        self, make_encoder: Callable[..., Encoder], make_tokenizer: Callable[..., Any]
    ) -> None:
        base = make_encoder()
        keys = [
            store_key("source", base.tokenizer, base.settings),
            store_key("other", base.tokenizer, base.settings),
            store_key("source", base.tokenizer, make_encoder(max_length=99).settings),
            store_key("source", make_encoder(styles.PHI3).tokenizer, base.settings),
            store_key("source", make_tokenizer(styles.CHATML, eos="</s>"), base.settings),
            store_key("source", make_tokenizer(styles.CHATML, kind="metaspace"), base.settings),
        ]
        assert len(set(keys)) == len(keys)
        again = make_encoder()
        assert keys[0] == store_key("source", again.tokenizer, again.settings)
