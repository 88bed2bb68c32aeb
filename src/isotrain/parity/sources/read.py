"""Finds out how a run was written."""

from __future__ import annotations

import os
from pathlib import Path

from isotrain.errors import DataError
from isotrain.files import parse_json
from isotrain.parity.run import Run
from isotrain.parity.sources.bounded import Source
from isotrain.parity.sources.csv_table import is_csv_header, read_csv
from isotrain.parity.sources.isotrain_run import is_isotrain_run, read_isotrain_run
from isotrain.parity.sources.json_lines import read_json_lines
from isotrain.parity.sources.msprobe_dump import is_msprobe_dump, read_msprobe_dump
from isotrain.parity.sources.openrlhf import is_openrlhf_line, read_openrlhf
from isotrain.parity.sources.tensorboard import event_files, is_event_file, read_tensorboard
from isotrain.parity.sources.tfrecord import starts_a_record
from isotrain.parity.sources.verl_console import metrics_of, read_verl_console
from isotrain.parity.sources.verl_file import is_verl_row, read_verl_file

_FORMATS = (
    "an isotrain run directory, a console or file log of verl, a console log of OpenRLHF, TensorBoard event "
    "files, CSV or JSONL with a column `step`, or a dump of msprobe"
)


def read_run(path: str | os.PathLike[str]) -> Run:
    """The curves of a run in any format, told by its content and, where that is not enough, by its name."""
    path = Path(path)
    try:
        is_directory = path.is_dir()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error})") from error
    return _read_directory(path) if is_directory else _read_file(path)


def _read_directory(path: Path) -> Run:
    if is_isotrain_run(path):
        return read_isotrain_run(path)
    if event_files(path):
        return read_tensorboard(path)
    if is_msprobe_dump(path):
        return read_msprobe_dump(path)
    raise DataError(f"{path}: neither metrics.jsonl nor event files nor dump.json in it; give {_FORMATS}")


def _read_file(path: Path) -> Run:
    head = next(Source(path).chunks(), b"")
    if not head.strip():
        raise DataError(f"{path}: no metrics in it: the file is empty")
    if is_event_file(path.name) or starts_a_record(head[:12]):
        return read_tensorboard(path)
    first = head.lstrip().split(b"\n", 1)[0].decode("utf-8-sig", errors="replace").strip()
    suffix = path.suffix.lower()
    row = _object(first)
    if row is not None or suffix == ".jsonl":
        return read_verl_file(path) if row and is_verl_row(row) else read_json_lines(path)
    if suffix in (".csv", ".tsv") or is_csv_header(first):
        return read_csv(path)
    return _read_console(path)


def _object(line: str) -> dict[str, object] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _read_console(path: Path) -> Run:
    """Logs hold the output of many programs: the first line with metrics tells whose it is."""
    for _, line, _ in Source(path).console_lines():
        if metrics_of(line):
            return read_verl_console(path)
        if is_openrlhf_line(line):
            return read_openrlhf(path)
    raise DataError(f"{path}: no metrics in it; give {_FORMATS}")
