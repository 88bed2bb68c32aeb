"""Data files and Hub data sets as a stream of plain rows, each with its origin."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isotrain import hub
from isotrain.errors import DataError, install

_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_PARQUET_BATCH = 1024
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Row:
    values: Mapping[str, Any]
    origin: str
    """`file:line` for JSON lines, `file row N` (from 0) otherwise: every later error begins with it."""
    directory: Path | None = field(default=None, compare=False)
    """Of its file, which paths in it start from; rows of the Hub have none."""


@dataclass(frozen=True)
class Rows:
    """The rows of a source; each iteration reads the files anew, so memory does not grow with them."""

    _parts: tuple[Callable[[], Iterator[Row]], ...]

    def __iter__(self) -> Iterator[Row]:
        for part in self._parts:
            yield from part()


def read_rows(source: str | Sequence[str]) -> Rows:
    """Rows of `.jsonl`, `.json`, `.parquet` and `.csv` files, directories, and Hub data sets, in order.

    A Hub data set is `name`, `name:split` or `name:config:split`; the split is `train` unless given. The
    name may end in `@revision`: a commit, tag or branch.
    """
    parts: list[Callable[[], Iterator[Row]]] = []
    for name in _names(source):
        if (files := _files(name)) is None:
            parts.append(_HubReader(name))
        else:
            parts.extend(_FileReader(file) for file in files)
    return Rows(tuple(parts))


def first_row(source: str | Sequence[str]) -> Row | None:
    """The first row of a source; None where a hub has to be asked for it. All names are looked at."""
    files = [_files(name) for name in _names(source)]
    for name in (name for name, local in zip(_names(source), files, strict=True) if local is None):
        repository = name.partition(":")[0].partition("@")[0]  # revisions and splits may have both
        if repository.count("/") > 1 or name.startswith("-") or " " in repository:
            raise DataError(f"{name}: no such file or directory")
    if None in files:
        return None
    row = next(iter(read_rows(source)), None)
    if row is None:
        raise DataError(f"{source}: there are no rows; give a file that has some")
    return row


def source_digest(source: str | Sequence[str]) -> str:
    """SHA-256 over the contents of a source's files; their names and places do not count."""
    total = hashlib.sha256()
    for name in _names(source):
        files = _files(name)
        if files is None:
            # Arrow files in the local cache: the rows as they were downloaded.
            files = [Path(entry["filename"]) for entry in _load_hub(name).cache_files]
        for file in files:
            with _opened(file) as stream:
                content = hashlib.sha256()
                while chunk := stream.read(_CHUNK):
                    content.update(chunk)
            total.update(file.suffix.encode() + content.digest())
    return total.hexdigest()


def count_rows(source: str | Sequence[str]) -> int:
    """Estimated rows of a source, for progress: lines are counted, not parsed; 0 is unknown."""
    return sum(
        len(_load_hub(name)) if files is None else sum(map(_count, files))
        for name in _names(source)
        for files in [_files(name)]
    )


def local_rows(source: str | Sequence[str]) -> int:
    """The same without asking a hub: 0 where one of the names is not here."""
    if not all(Path(name).expanduser().exists() for name in _names(source)):
        return 0
    return count_rows(source)


def _count(file: Path) -> int:
    with _opened(file) as stream:
        if file.suffix == ".parquet":
            import pyarrow.parquet

            return int(pyarrow.parquet.ParquetFile(stream).metadata.num_rows)
        return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(_CHUNK), b""))


def _names(source: str | Sequence[str]) -> list[str]:
    names = [source] if isinstance(source, str) else list(source)
    if not names:
        raise DataError("no data given: name a .jsonl, .parquet or .csv file, a directory, or a Hub data set")
    return names


def _files(name: str) -> list[Path] | None:
    """The files behind a name, or None when it can only be a Hub name."""
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix in _SUFFIXES and not f.name.startswith("."))
        if not files:
            raise DataError(f"{name}: the directory has no {', '.join(_SUFFIXES)} file")
        return files
    if path.exists():
        if path.suffix not in _SUFFIXES:
            raise DataError(f"{name}: unknown kind of file; convert it to .jsonl, .parquet or .csv")
        return [path]
    if path.suffix in _SUFFIXES or name.startswith(("/", ".", "~")):
        raise DataError(f"{name}: no such file or directory")
    return None


def _opened(file: Path) -> Any:
    try:
        return file.open("rb")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class _FileReader:
    file: Path

    def __call__(self) -> Iterator[Row]:
        if self.file.suffix == ".parquet":
            return _parquet_rows(self.file)
        if self.file.suffix == ".csv":
            return _csv_rows(self.file)
        return _json_rows(self.file)


def _json_rows(file: Path) -> Iterator[Row]:
    with _opened(file) as stream:
        if file.suffix == ".json" and stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            stream.seek(0)
            yield from _array_rows(file, stream.read())
            return
        stream.seek(0)
        for number, line in enumerate(stream, start=1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                value = _parse(text, f"{file}:{number}")
                yield Row(_as_row(value, f"{file}:{number}"), f"{file}:{number}", file.parent)


def _csv_rows(file: Path) -> Iterator[Row]:
    """Texts by the names in the first line; quoted ones may have commas and lines."""
    with _opened(file) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        lines = csv.reader(text, strict=True)
        try:
            names = next(lines, [])
            if not all(names) or len(set(names)) != len(names):
                raise DataError(
                    f"{file}:1: the first line must name the columns, each once: {','.join(names)!r}"
                )
            for values in lines:
                origin = f"{file}:{lines.line_num}"
                if values and len(values) != len(names):
                    counts = f"{len(values)} values for {len(names)} columns"
                    raise DataError(f"{origin}: {counts}; quote a text that has a comma")
                if values:
                    yield Row(dict(zip(names, values, strict=True)), origin, file.parent)
        except csv.Error as error:
            raise DataError(f"{file}:{lines.line_num}: broken CSV: {error}") from None
        except UnicodeDecodeError:
            raise DataError(f"{file}: not UTF-8 text; save the file as UTF-8") from None


def _array_rows(file: Path, data: bytes) -> Iterator[Row]:
    for number, value in enumerate(_parse(data.removeprefix(b"\xef\xbb\xbf"), str(file))):
        yield Row(_as_row(value, f"{file} row {number}"), f"{file} row {number}", file.parent)


def _parse(data: bytes, origin: str) -> Any:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        # In a file of lines the origin has the line already; an array has lines of its own.
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(f"{origin}: broken JSON at {line}column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, nesting without end
        raise DataError(f"{origin}: JSON that cannot be read: {error}") from None
    if "\\ud" in text or "\\uD" in text:
        _refuse_half_characters(value, origin)
    return value


def _refuse_half_characters(value: Any, origin: str) -> None:
    """Half of a surrogate pair is legal in JSON, but is no text that a tokenizer could take."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError(f"{origin}: a lone \\ud800-\\udfff escape is half a character; remove it") from None


def _as_row(value: Any, origin: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{origin}: a row must be a JSON object, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _parquet_rows(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    with _opened(file) as stream:
        try:
            for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(_PARQUET_BATCH):
                for values in batch.to_pylist():
                    yield Row(_without_nulls(values), f"{file} row {number}", file.parent)
                    number += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{file}: broken Parquet after row {number}: {error}") from None


@dataclass(frozen=True)
class _HubReader:
    name: str

    def __call__(self) -> Iterator[Row]:
        for number, values in enumerate(_load_hub(self.name)):
            yield Row(_without_nulls(values), f"{self.name} row {number}")


def _load_hub(name: str) -> Any:
    repository, *rest = name.split(":")
    repository, _, revision = repository.partition("@")
    if len(rest) > 2:
        raise DataError(f"{name}: write a Hub data set as name, name:split or name:config:split")
    split = rest[-1] if rest else "train"
    config = rest[0] if len(rest) == 2 else None
    on_modelscope = hub.chosen() == hub.MODELSCOPE
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{name}: no such file, and Hub data sets need one more package: {install('hub')}"
        ) from None
    try:
        if on_modelscope:
            directory = hub.download(name.split(":")[0], "dataset", ["*"])
            return datasets.load_dataset(
                str(directory), config, split=split, cache_dir=_arrow_cache(directory)
            )
        return datasets.load_dataset(repository, config, split=split, revision=revision or None)
    except Exception as error:  # the library raises dozens of kinds; all mean that there is no data
        raise DataError(
            f"{name} is neither a local file or directory nor a loadable data set {hub.explain(error)}"
        ) from error


def _arrow_cache(directory: Path) -> str:
    """Where to keep the rows of a local directory: the library would take equal names for equal data."""
    import datasets

    files = sorted(path for path in directory.rglob("*") if path.is_file())
    facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    return str(Path(datasets.config.HF_DATASETS_CACHE) / "isotrain" / digest)


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct all fields of its column, null where a row had none; drop those again."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
