"""Stores do not depend on how they were built: in how many chunks, in how many attempts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chat_templates as styles
import pytest

from isotrain.data import tokenise
from isotrain.data.encode import Encoder
from isotrain.data.rows import read_rows
from isotrain.data.tokenise import build_store
from isotrain.errors import DataError

pytestmark = pytest.mark.heavy

ROWS = 60
# A template that takes about as long as asked for; the sandbox limits one range, not two.
SLOW = "{% for a in range(300) %}{% for b in range(300) %}{% endfor %}{% endfor %}"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "CHUNK_ROWS", 7)


@pytest.fixture
def encoder(make_tokenizer: Callable[..., Any]) -> Encoder:
    tokenizer = make_tokenizer(styles.CHATML, eos="<|im_end|>")
    return Encoder(tokenizer, "auto", "prompt", "completion", 30, "drop")


def write(file: Path, **changes: Any) -> Path:
    lines = [json.dumps({"prompt": f"What is {n}?", "completion": "Paris " * (n % 30)}) for n in range(ROWS)]
    for number, line in changes.items():
        lines[int(number.removeprefix("row"))] = line
    file.write_text("\n".join(lines) + "\n")
    return file


def test_chunks_do_not_change_a_store(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = read_rows(str(write(tmp_path / "a.jsonl")))
    many = build_store(rows, encoder, tmp_path / "many", "key")
    monkeypatch.setattr(tokenise, "CHUNK_ROWS", 1000)
    whole = build_store(rows, encoder, tmp_path / "whole", "key")
    assert whole.meta == many.meta and whole.meta["dropped"] > 0
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "many" / file.name).read_bytes()


def test_the_first_error_by_row_is_told(tmp_path: Path, encoder: Encoder) -> None:
    """A row that cannot be encoded comes before a later one that cannot be read."""
    source = write(tmp_path / "a.jsonl", row31='{"prompt": 3, "completion": "x"}', row33="{")
    with pytest.raises(DataError, match=r"a\.jsonl:32: "):
        build_store(read_rows(str(source)), encoder, tmp_path / "s", "key")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"], "no chunks of a key that has no store"


def count_chunks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The chunks that this process encodes from now on."""
    own: list[str] = []
    encode = tokenise.encode_chunk

    def counted(encoder: Any, rows: Any, path: Path) -> None:
        own.append(path.name)
        encode(encoder, rows, path)

    monkeypatch.setattr(tokenise, "encode_chunk", counted)
    return own


@pytest.fixture
def shared_work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two more processes from the first chunk on; the chunks that the builder encodes itself."""
    monkeypatch.setattr(tokenise, "SECONDS_ALONE", -1.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    return count_chunks(monkeypatch)


def test_processes_do_not_change_a_store(tmp_path: Path, encoder: Encoder, shared_work: list[str]) -> None:
    source = str(write(tmp_path / "a.jsonl"))
    alone = build_store(read_rows(source), encoder, tmp_path / "alone", "key")
    assert len(shared_work) == 9, "without a source there is nothing to share"
    shared_work.clear()
    together = build_store(read_rows(source), encoder, tmp_path / "together", "key", source=source)
    assert together.meta == alone.meta and shared_work == ["0-7", "21-7", "42-7"]
    for file in (tmp_path / "alone").iterdir():
        assert file.read_bytes() == (tmp_path / "together" / file.name).read_bytes()
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.jsonl", "alone", "together"}


def test_the_builder_does_what_a_lost_process_leaves(
    tmp_path: Path, encoder: Encoder, shared_work: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(write(tmp_path / "a.jsonl"))
    start = tokenise.Workers.start

    def lost(workers: Any) -> None:
        start(workers)
        for process in workers._processes:
            process.kill()

    monkeypatch.setattr(tokenise.Workers, "start", lost)
    together = build_store(read_rows(source), encoder, tmp_path / "together", "key", source=source)
    assert len(shared_work) == 9 and together.meta["rows"] == ROWS


def test_the_first_error_of_several_processes(
    tmp_path: Path, encoder: Encoder, shared_work: list[str]
) -> None:
    wrong = '{"prompt": 3, "completion": "x"}'
    source = str(write(tmp_path / "a.jsonl", row31=wrong, row38=wrong))
    with pytest.raises(DataError, match=r"a\.jsonl:32: "):
        build_store(read_rows(source), encoder, tmp_path / "s", "key", source=source)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]


BUILD = """
import sys, pickle
from pathlib import Path
from isotrain.data import tokenise
from isotrain.data.rows import read_rows
tokenise.CHUNK_ROWS = 7
encoder = pickle.loads(Path(sys.argv[1]).read_bytes())
tokenise.build_store(read_rows(sys.argv[2]), encoder, Path(sys.argv[3]), "key")
"""


def test_a_killed_builder_leaves_what_it_has_done(
    tmp_path: Path, make_tokenizer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pickle

    slow = Encoder(
        make_tokenizer(SLOW + styles.CHATML, eos="<|im_end|>"), "auto", "prompt", "completion", 60, "drop"
    )
    conversations = [
        json.dumps(
            {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes"}]}
        )
        for n in range(ROWS)
    ]
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(conversations) + "\n")
    (tmp_path / "encoder").write_bytes(pickle.dumps(slow))
    arguments = [str(tmp_path / "encoder"), str(source), str(tmp_path / "s")]
    builder = subprocess.Popen([sys.executable, "-c", BUILD, *arguments])
    chunks = tmp_path / ".s.chunks"
    while not (chunks.is_dir() and sum("." not in file.name for file in chunks.iterdir()) >= 3):
        assert builder.poll() is None
        time.sleep(0.01)
    os.kill(builder.pid, signal.SIGKILL)
    builder.wait()
    kept = {file.name for file in chunks.iterdir() if "." not in file.name}
    assert not (tmp_path / "s").exists() and 3 <= len(kept) < ROWS // 7
    damaged = chunks / "7-7"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    encoded = count_chunks(monkeypatch)
    again = build_store(read_rows(str(source)), slow, tmp_path / "s", "key")
    assert not kept - {"7-7"} & set(encoded) and "7-7" in encoded
    fresh = build_store(read_rows(str(source)), slow, tmp_path / "fresh", "key")
    assert again.digest == fresh.digest and not chunks.exists()
