"""Rows of a source to a store that is built once, by several processes where that is worth it."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import io
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from isotrain.children import die_with_parent, module_command
from isotrain.data.encode import Encoder, PromptEncoder
from isotrain.data.preference import PreferenceEncoder
from isotrain.data.rows import Row, count_rows, read_rows, source_digest
from isotrain.data.store import META, OFFSETS, Codec, Columns, SampleStore, store_key
from isotrain.errors import DataError

CHUNK_ROWS = 1024
_SUM = 32  # bytes of a SHA-256

T = TypeVar("T")


class RowEncoder(Protocol[T]):
    """Rows to values of one kind; its first row may decide how it reads the others."""

    name: ClassVar[str]
    """Name of its kind, by which another process makes the same one."""
    tokenizer: PreTrainedTokenizerBase
    codec: Codec[T]
    arguments: dict[str, Any]
    """Arguments that it was made with besides the tokenizer, as JSON can hold them."""

    @property
    def settings(self) -> dict[str, Any]: ...

    def values(self, row: Row) -> Sequence[T]: ...


def chunked(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """Rows in chunks. Those before a row that cannot be read come first: they may have an earlier error."""
    chunk: list[Row] = []
    try:
        for row in rows:
            chunk.append(row)
            if len(chunk) == size:
                yield chunk
                chunk = []
    except DataError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


def chunk_path(directory: Path, first: int, rows: Sequence[Row]) -> Path:
    """File of the chunk that begins at row `first`."""
    return directory / f"{first}-{len(rows)}"


def encode_chunk(encoder: RowEncoder[Any], rows: Sequence[Row], path: Path) -> None:
    """Write what rows are encoded to, with its SHA-256 before it."""
    codec = encoder.codec
    entries: list[Columns] = []
    dropped = 0
    for row in rows:  # only columns are kept: the values of a chunk may hold gigabytes of pixels
        values = encoder.values(row)
        entries += map(codec.write, values)
        dropped += not values
    arrays: dict[str, npt.NDArray[Any]] = {"rows": np.array([len(rows), dropped], np.int64)}
    for part in codec.layout:
        for name, kind in part.types.items():
            whole = [np.zeros(0, kind), *(entry[name] for entry in entries)]
            arrays[name] = np.concatenate([column.astype(kind) for column in whole])
            lengths = np.array([len(entry[name]) for entry in entries], OFFSETS)
            assert np.array_equal(arrays.setdefault(part.offsets, lengths), lengths), "equally many elements"
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    data = file.getvalue()
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    partial.write_bytes(hashlib.sha256(data).digest() + data)
    partial.rename(path)


def read_chunk(path: Path) -> bytes | None:
    """Content of a chunk; None where there is none, or another than was written."""
    with suppress(OSError):
        content = path.read_bytes()
        if hashlib.sha256(content[_SUM:]).digest() == content[:_SUM]:
            return content[_SUM:]
    return None


# Starting a process takes about as long.
SECONDS_ALONE = 10.0
# One process puts the results together: more than this many would wait for it.
MOST_PROCESSES = 16
SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_LOOKS = 0.05

Tell = Callable[[str], None]


def cached_store(
    source: str | Sequence[str], encoder: RowEncoder[T], root: Path, tell: Tell | None = None
) -> SampleStore[T]:
    """The store of a source under `root`, built if it is not there."""
    identity = source_digest(source)
    if pictures := getattr(encoder, "pictures", None):
        identity += pictures.files_digest(source)
    key = store_key(identity, encoder.tokenizer, encoder.settings)
    directory = root / key
    if not directory.is_dir():
        progress = RowProgress(source, tell) if tell else None
        with _explaining_failures(root), _one_builder(directory, progress):
            if not directory.is_dir():
                build_store(read_rows(source), encoder, directory, key, progress, source)
    return SampleStore(directory, encoder.codec)


def build_store(
    rows: Iterable[Row],
    encoder: RowEncoder[T],
    directory: Path,
    key: str,
    progress: RowProgress | None = None,
    source: str | Sequence[str] | None = None,
) -> SampleStore[T]:
    """Encode all rows into a directory that appears whole or not at all.

    Finished chunks of rows are kept beside it until then: the next attempt goes on with them. Two builders
    at once do the same work; the first to finish wins and the other takes its result. Where `source` says
    where the rows are from, more processes read it too and encode a share of the chunks each.
    """
    source_encoder = copy.copy(encoder)  # what the first row decides holds for this source alone
    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0))) if source else 1
    partial = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.partial")
    chunks = directory.with_name(f".{directory.name}.chunks")
    with _explaining_failures(directory.parent):
        try:
            partial.mkdir(parents=True)
            chunks.mkdir(exist_ok=True)
            with Workers(source, encoder, chunks, processes - 1, CHUNK_ROWS) as workers:
                _write(_encoded(rows, source_encoder, chunks, workers), partial, encoder.codec, key, progress)
            partial.rename(directory)
        except DataError:
            shutil.rmtree(chunks, ignore_errors=True)  # other rows or settings have another key
            raise
        except OSError:
            if not (directory / META).is_file():
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(chunks, ignore_errors=True)
    return SampleStore(directory, encoder.codec)


@dataclass
class RowProgress:
    """A line now and then about how far the rows of a source are."""

    source: str | Sequence[str]
    tell: Tell

    def __post_init__(self) -> None:
        self._started = self._last_line = time.monotonic()
        self._total = 0

    def update(self, rows: int) -> None:
        now = time.monotonic()
        if now - self._last_line < SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        self._total = self._total or count_rows(self.source)
        speed = rows / (now - self._started)
        share = f", {min(1.0, rows / self._total):.0%}" if self._total else ""
        self.tell(f"tokenising {self.source}: {rows:,} rows{share}, {speed:,.0f} rows/s")


@contextmanager
def _explaining_failures(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{root}: cannot cache tokens there ({error.strerror or error}); "
            "free disk space, or set ISOTRAIN_CACHE to another directory"
        ) from error


@contextmanager
def _one_builder(directory: Path, progress: RowProgress | None) -> Iterator[None]:
    """Others wait, without a limit; the system frees the lock however the builder ends, and the next goes on.

    Where a file system has no locks, each machine builds, and the first to finish wins.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    path = directory.with_name(f".{directory.name}.lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                progress.tell(f"tokenising {progress.source}: waiting for another process that does it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
        path.unlink(missing_ok=True)


def _encoded(
    rows: Iterable[Row], encoder: RowEncoder[Any], chunks: Path, workers: Workers
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Encoded chunks in the order of the rows; what an earlier attempt or a worker has written is taken."""
    first, started = 0, time.monotonic()
    for number, chunk in enumerate(chunked(rows, CHUNK_ROWS)):
        if first == 0:
            encoder.values(chunk[0])  # it may decide how the others are read
        path = chunk_path(chunks, first, chunk)
        first += len(chunk)
        if time.monotonic() - started > SECONDS_ALONE:
            workers.start()
        busy = True
        while (data := read_chunk(path)) is None and busy:
            busy = workers.busy_with(number)  # asked before the last look
            time.sleep(SECONDS_BETWEEN_LOOKS if busy else 0)
        if data is None:
            encode_chunk(encoder, chunk, path)
            data = read_chunk(path)
            assert data is not None
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            yield dict(arrays)


def _write(
    chunks: Iterable[dict[str, npt.NDArray[Any]]],
    directory: Path,
    codec: Codec[Any],
    key: str,
    progress: RowProgress | None,
) -> None:
    types = codec.types()
    sums = {name: hashlib.sha256() for name in types}
    offsets = {part.offsets: array("q", [0]) for part in codec.layout}
    totals = Counter(dict.fromkeys(codec.sums, 0))
    rows = dropped = 0
    with ExitStack() as stack:
        files = {name: stack.enter_context((directory / name).open("wb")) for name in types}

        def put(name: str, values: npt.NDArray[Any]) -> None:
            data = values.tobytes()
            files[name].write(data)
            sums[name].update(data)

        for chunk in chunks:
            for name in types:
                if name in offsets:
                    ends = offsets[name][-1] + np.cumsum(chunk[name])
                    offsets[name].frombytes(ends.astype(np.int64).tobytes())
                else:
                    put(name, chunk[name])
            totals.update({name: int(chunk[column].sum()) for name, column in codec.sums.items()})
            rows, dropped = rows + int(chunk["rows"][0]), dropped + int(chunk["rows"][1])
            if progress is not None:
                progress.update(rows)
        if rows == dropped:
            raise DataError(f"no samples: {dropped} of {rows} rows were dropped; check data.too_long")
        for name, bounds in offsets.items():
            put(name, np.frombuffer(bounds, np.int64).astype(OFFSETS))
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    meta = {
        "version": codec.version,
        "key": key,
        "rows": rows,
        "dropped": dropped,
        **{part.count: offsets[part.offsets][-1] for part in codec.layout},
        **totals,
        "digest": hashlib.sha256(b"".join(sums[name].digest() for name in types)).hexdigest(),
    }
    with (directory / META).open("w", encoding="utf-8") as text:
        text.write(json.dumps(meta, indent=2) + "\n")
        text.flush()
        os.fsync(text.fileno())


ENCODERS: dict[str, Any] = {kind.name: kind for kind in (Encoder, PreferenceEncoder, PromptEncoder)}


class Workers:
    """Each reads the whole source and writes every n-th chunk; the builder encodes what they leave out.

    They get plain text and write files that the builder checks, so that nothing is pickled. One that ends
    early, also on a row that cannot be encoded, leaves its chunks to the builder, which reports the error.
    """

    def __init__(
        self,
        source: str | Sequence[str] | None,
        encoder: RowEncoder[Any],
        chunks: Path,
        count: int,
        chunk_rows: int,
    ) -> None:
        self._encoder, self._chunks, self._count = encoder, chunks, count
        self._task = {"source": source, "chunks": str(chunks), "chunk_rows": chunk_rows, "shares": count + 1}
        self._processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Once; without an effect where there is nothing to share."""
        if self._processes or not self._count:
            return
        tokenizer = self._chunks / "tokenizer"
        self._encoder.tokenizer.save_pretrained(tokenizer)
        command = module_command("isotrain.data.tokenise")
        for share in range(1, self._count + 1):
            task = {
                **self._task,
                "share": share,
                "parent": os.getpid(),
                "encoder": self._encoder.name,
                "arguments": self._encoder.arguments,
                "tokenizer": str(tokenizer),
            }
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            self._processes.append(process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(task))
            process.stdin.close()

    def busy_with(self, number: int) -> bool:
        """Whether a worker that still runs has this chunk in its share."""
        share = number % (self._count + 1)
        return bool(self._processes and share and self._processes[share - 1].poll() is None)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def encode_share(task: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    encoder = ENCODERS[task["encoder"]](tokenizer, **task["arguments"])
    directory, first = Path(task["chunks"]), 0
    for number, rows in enumerate(chunked(read_rows(task["source"]), task["chunk_rows"])):
        if first == 0:
            encoder.values(rows[0])
        path = chunk_path(directory, first, rows)
        first += len(rows)
        if number % task["shares"] == task["share"] and not path.exists():
            encode_chunk(encoder, rows, path)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    die_with_parent(given["parent"])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes themselves are the parallelism
    try:
        encode_share(given)
    except (DataError, OSError):
        sys.exit(1)
