"""The memory that decoding a Parquet file takes, known before: a few bytes can stand for billions of values.

The footer's counts and sizes are claims. The header in front of each page says what a reader decodes,
so these are read here. Arrow follows the same headers, and gives no page more values than its header says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from isotrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow.parquet

MOST_BYTES = 512 << 20
"""Most bytes of decoded columns of a row group, one of which is in memory; Arrow takes up to twice it."""
MOST_ROWS = 1 << 21
"""Most rows of a file. One of a rank and step has some thousands."""

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 16}
# Two levels of 16 bits for each value; as a Python object, where it becomes one, the rest.
_LEVELS, _OBJECT = 4, 64
_DICTIONARY_PAGE = 2
_PLAIN, _PLAIN_DICTIONARY, _DELTA_LENGTHS, _DELTA_STRINGS, _RLE_DICTIONARY = 0, 2, 6, 7, 8
_HEADER_BYTES, _MOST_HEADER_BYTES = 512, 1 << 20


class _Page(NamedTuple):
    type: int
    uncompressed: int
    compressed: int
    values: int
    encoding: int


def check_rows(file: pyarrow.parquet.ParquetFile) -> None:
    """Refuse what is no file of this package before any of it is decoded."""
    if file.metadata.num_rows > MOST_ROWS:
        raise DataError(f"{file.metadata.num_rows:,} rows of at most {MOST_ROWS:,}")
    # Arrow reads beyond the end of a column in files of old versions of it.
    if str(file.metadata.created_by).startswith("parquet-mr"):
        raise DataError("written by parquet-mr, not by isotrain")


def check_group(
    file: pyarrow.parquet.ParquetFile,
    stream: BinaryIO,
    group: int,
    names: Collection[str],
    lists: Collection[str] = (),
) -> None:
    """A DataError if decoding these columns of a row group may take more than `MOST_BYTES`.

    `lists` become arrays; values of the others may become Python objects.
    """
    metadata, total = file.metadata.row_group(group), 0
    for number in range(metadata.num_columns):
        chunk = metadata.column(number)
        path: str = chunk.path_in_schema
        if any(path == name or path.startswith(f"{name}.") for name in names):
            total += _decoded_bytes(stream, chunk, as_array=path.partition(".")[0] in lists)
        if total > MOST_BYTES:
            raise DataError(
                f"decoding {path!r:.60} may take more than {MOST_BYTES >> 20} MiB, from "
                f"{chunk.total_compressed_size:,} bytes"
            )


def _decoded_bytes(stream: BinaryIO, chunk: Any, *, as_array: bool) -> int:
    if (width := _WIDTHS.get(chunk.physical_type)) is None:
        raise DataError(f"values of type {chunk.physical_type}")
    texts = chunk.physical_type == "BYTE_ARRAY"
    values = largest = expanded = dictionary = 0
    for page in _pages(stream, chunk):
        largest = max(largest, page.uncompressed)
        if page.type == _DICTIONARY_PAGE:
            dictionary = max(dictionary, page.uncompressed)
            continue
        values += page.values
        if not texts:
            continue
        if page.encoding in (_PLAIN, _DELTA_LENGTHS):
            expanded += page.uncompressed
        elif page.encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY):
            expanded += page.values * dictionary  # each may be the longest text of the dictionary
        elif page.encoding == _DELTA_STRINGS:
            expanded += page.values * page.uncompressed  # each may begin with all of the one before
        else:
            raise DataError(f"texts in encoding {page.encoding}")
    # Once as Arrow has it, once as the caller does.
    each = _LEVELS + (2 * width if as_array else width + _OBJECT)
    return values * each + 2 * expanded + largest


def _pages(stream: BinaryIO, chunk: Any) -> Iterator[_Page]:
    """The headers of the pages that a reader of this column would meet, from where Arrow begins to read."""
    position: int = chunk.data_page_offset
    first = chunk.dictionary_page_offset
    if first is not None and 0 < first < position:
        position = first
    end = position + chunk.total_compressed_size
    while position < end:
        page, size = _read_header(stream, position)
        if page.compressed < 0 or page.uncompressed < 0 or page.values < 0:
            raise DataError("a page of a negative size")
        yield page
        position += size + page.compressed


def _read_header(stream: BinaryIO, position: int) -> tuple[_Page, int]:
    if position < 0:
        raise DataError("a page outside of the file")
    length = _HEADER_BYTES
    while True:
        stream.seek(position)
        data = stream.read(length)
        try:
            fields, size = _struct(data, 0, 0)
            break
        except IndexError as error:
            if len(data) < length or length >= _MOST_HEADER_BYTES:
                raise DataError("a page without a header") from error
            length *= 8  # it has long statistics
    inner: dict[int, Any] = next(
        (fields[number] for number in (5, 7, 8) if isinstance(fields.get(number), dict)), {}
    )
    encoding = inner.get(4 if isinstance(fields.get(8), dict) else 2, _PLAIN)
    numbers = (fields.get(1), fields.get(2), fields.get(3), inner.get(1, 0), encoding)
    if not all(type(number) is int for number in numbers):
        raise DataError("a page without a header")
    return _Page(*numbers), size  # type: ignore[arg-type]


# Thrift's compact protocol, as much as page headers have: a field is a byte with its type and the step from
# the last number, and then its value.
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 12
_WHOLE = (4, 5, 6)
_DEEPEST = 8


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    if depth > _DEEPEST:
        raise DataError("a page header nested too deeply")
    fields: dict[int, Any] = {}
    number = 0
    while (head := data[at]) != _STOP:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            encoded, at = _varint(data, at)
            number = _signed(encoded)
        fields[number], at = _value(data, at, head & 15, depth)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (_TRUE, _FALSE):
        return kind == _TRUE, at
    if kind in _WHOLE:
        encoded, at = _varint(data, at)
        return _signed(encoded), at
    if kind == _STRUCT:
        return _struct(data, at, depth + 1)
    if kind in (_BYTE, _DOUBLE):
        return None, at + (1 if kind == _BYTE else 8)
    if kind == _BINARY:
        size, at = _varint(data, at)
        return None, at + size
    if kind in (_LIST, _SET):
        head, at = data[at], at + 1
        count, at = (head >> 4, at) if head >> 4 < 15 else _varint(data, at)
        for _ in range(count):
            if head & 15 in (_TRUE, _FALSE):
                at += 1
            else:
                _, at = _value(data, at, head & 15, depth + 1)
            data[at - 1]  # so that a large count ends with the data
        return None, at
    raise DataError(f"a page header with a field of type {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise DataError("a page header with a number of more than 64 bits")


def _signed(value: int) -> int:
    return value >> 1 ^ -(value & 1)
