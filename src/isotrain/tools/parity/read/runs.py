"""Runs of any format; isotrain's own has metrics.jsonl, resolved.json and environment.json (its last start).

isotrain's metrics are exact through every resume, so a step that comes twice is damage and not a resume.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotrain.errors import DataError
from isotrain.files import parse_json
from isotrain.observe.run_directory import RunDirectory
from isotrain.recipe.difference import changes
from isotrain.tools.parity.read.baseline import begins_baseline
from isotrain.tools.parity.read.bounded import Source, clipped, inside
from isotrain.tools.parity.read.columns import Columns
from isotrain.tools.parity.read.msprobe_dump import is_msprobe_dump, read_msprobe_dump
from isotrain.tools.parity.read.openrlhf import is_openrlhf_line, read_openrlhf
from isotrain.tools.parity.read.tables import is_csv_header, objects, read_csv, read_json_lines, value_of
from isotrain.tools.parity.read.tensorboard import (
    event_files,
    is_event_file,
    read_tensorboard,
    starts_a_record,
)
from isotrain.tools.parity.read.verl import is_verl_row, metrics_of, read_verl_console, read_verl_file
from isotrain.tools.parity.run import RunLog, section

_MAX_FACTS = 64 << 20
# What makes it another device; `rollout` is beside them in online runs.
_OF_DEVICE = ("type", "name", "ranks", "mesh", "determinism")
# They hold a processor below its best instructions, which makes it another device to `parity certify`.
INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")

_FORMATS = (
    "an isotrain run directory, a console or file log of verl, a console log of OpenRLHF, TensorBoard event "
    "files, CSV or JSONL with a column `step`, or a dump of msprobe"
)


def is_isotrain_run(path: Path) -> bool:
    return RunDirectory(path).metrics.is_file()


def read_isotrain_run(path: Path) -> RunLog:
    run = RunDirectory(path)
    source = Source(inside(path, run.metrics.name))
    columns = Columns(source)
    for line, row in objects(source):
        step = row.pop("step", None)
        if isinstance(step, bool) or not isinstance(step, int) or not -(2**63) <= step < 2**63:
            raise source.error(f"`step` is not a whole number: {clipped(str(step))}", line)
        metrics = []
        for name, value in row.items():
            parsed = value if type(value) is float else value_of(value)
            if parsed is None:
                raise source.error(f"{clipped(name)} is not a number: {clipped(str(value))}", line)
            metrics.append((name, parsed))
        columns.add_row(step, metrics, line)
    curves = columns.run("isotrain run", "has the run taken a step?")
    digests = dict(source.sha256)
    recipe = _facts(path, run.resolved.name, digests)
    environment, data = _last_start(path, run.environment.name, digests)
    return replace(
        curves,
        path=path,
        recipe=recipe,
        environment=environment,
        planned_steps=_planned_steps(recipe),
        data=data,
        sha256=digests,
    )


def _planned_steps(recipe: dict[str, Any] | None) -> int | None:
    """None where the recipe counts epochs, or where the run is a probe and ends earlier."""
    steps = section(recipe, "trainer").get("steps")
    is_probe = section(recipe, "observe").get("layer_trace_after")
    return steps if type(steps) is int and not is_probe else None


def _last_start(
    path: Path, name: str, digests: dict[str, str]
) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """The environment of the newest start, and the digests of its data."""
    content = _facts(path, name, digests)
    if content is None:
        return None, {}
    starts = content.get("starts")
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise Source(path / name).error('no list "starts" of objects in it')
    if not starts:
        return None, {}
    for number, start in enumerate(starts[1:], start=2):
        if differ := changes(_device(starts[0]), _device(start)):
            raise Source(path / name).error(
                f"start {number} of this run was on another device than the first "
                f"({clipped('; '.join(differ), 300)}), so its curves are of neither: train again in a new "
                "directory"
            )
    environment = dict(starts[-1])
    data = environment.pop("data", {})
    if not isinstance(data, dict) or not all(isinstance(digest, str) for digest in data.values()):
        raise Source(path / name).error('"data" of the last start are not digests')
    return environment, data


def _device(start: dict[str, Any]) -> dict[str, Any]:
    """The device that a start computed on."""
    device, variables, host = (section(start, name) for name in ("device", "variables", "cpu"))
    facts = {name: device.get(name) for name in _OF_DEVICE}
    if device.get("type") == "cpu":
        facts |= {name: variables.get(name) for name in INSTRUCTIONS} | {"features": host.get("features")}
    return facts


def _facts(path: Path, name: str, digests: dict[str, str]) -> dict[str, Any] | None:
    """A JSON object of the directory; None where the file is not there, as in a copy of the curves alone."""
    if not (path / name).exists():
        return None
    source = Source(inside(path, name))
    content = source.json_object(_MAX_FACTS)
    digests.update(source.sha256)
    return content


def read_run(path: str | os.PathLike[str]) -> RunLog:
    """The curves of a run in any format, told by its content and, where that is not enough, by its name."""
    path = Path(path)
    try:
        is_directory = path.is_dir()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error})") from error
    return _read_directory(path) if is_directory else _read_file(path)


def _read_directory(path: Path) -> RunLog:
    if is_isotrain_run(path):
        return read_isotrain_run(path)
    if event_files(path):
        return read_tensorboard(path)
    if is_msprobe_dump(path):
        return read_msprobe_dump(path)
    raise DataError(f"{path}: neither metrics.jsonl nor event files nor dump.json in it; give {_FORMATS}")


def _read_file(path: Path) -> RunLog:
    head = next(Source(path).chunks(), b"")
    if not head.strip():
        raise DataError(f"{path}: no metrics in it: the file is empty")
    if is_event_file(path.name) or starts_a_record(head[:12]):
        return read_tensorboard(path)
    first = head.lstrip().split(b"\n", 1)[0].decode("utf-8-sig", errors="replace").strip()
    suffix = path.suffix.lower()
    if begins_baseline(head):
        raise DataError(f"{path}: a baseline stands for the reference: give it first, and a run second")
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


def _read_console(path: Path) -> RunLog:
    """Logs hold the output of many programs: the first line with metrics tells whose it is."""
    for _, line, _ in Source(path).console_lines():
        if metrics_of(line):
            return read_verl_console(path)
        if is_openrlhf_line(line):
            return read_openrlhf(path)
    raise DataError(f"{path}: no metrics in it; give {_FORMATS}")
