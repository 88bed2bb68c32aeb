"""Traces of a run's first updates (`observe.layer_trace`), checked before anything is believed.

E: entries of one kind, R: ranks, K: buckets of a sketch.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from isotrain.errors import DataError
from isotrain.files import parse_json
from isotrain.tools.parity.read.bounded import clipped, inside
from isotrain.tools.parity.run import Numbers

KINDS = ("activation", "gradient", "parameter gradient", "update")
DIGESTS = ("tokens", "packing", "loss")
FORMAT = 1

_FILE = re.compile(r"step-([0-9]{6})-rank-([0-9]{5})\.safetensors")
_MAX_BYTES = 512 << 20
_MAX_FILES = 10_000
_MAX_NAME = 500
_BUCKETS = 32
_RECOMPUTED = "update/recomputed"


@dataclass(frozen=True)
class TraceEntry:
    """One layer's or parameter's numbers in one update, on all ranks."""

    sketches_RKK: Numbers
    norm: float
    shapes: tuple[tuple[int, int], ...]
    weight_norm: float = math.nan
    """For an update: the norm of the parameter before it."""

    @property
    def size(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes)


@dataclass(frozen=True)
class Recomputed:
    """A parameter's update beside AdamW's of the run's own gradient, in float64."""

    units: float
    """Root mean square of the error, in roundings of the new weights."""
    gain: float
    gain_error: float
    """By which share the update is too large, with its standard error."""


@dataclass(frozen=True)
class Update:
    """One update, on all ranks; entries are in the order in which they were computed."""

    digests: tuple[dict[str, str], ...]
    loss: float
    kinds: dict[str, dict[str, TraceEntry]]
    recomputed: dict[str, Recomputed] = field(default_factory=dict)
    """By parameter, of the rank that is furthest off; empty in traces of earlier versions."""
    routes: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    """The experts of each token, by layer of experts; empty in a dense model."""
    scores: dict[str, Numbers] = field(default_factory=dict)
    """Of a truth: each expert's score for each token, over the root mean square of the router's logits."""
    model: str = ""
    """Of a truth: digest of the model's weights and constants."""


@dataclass(frozen=True)
class _TraceFile:
    ranks: int
    digests: dict[str, str]
    loss: float
    names: dict[str, list[str]]
    sketches: dict[str, Numbers]
    norms: dict[str, Numbers]
    shapes: dict[str, npt.NDArray[np.int64]]
    weight_norms: Numbers
    recomputed_P3: Numbers | None
    routes: dict[str, npt.NDArray[np.int32]]
    scores: dict[str, Numbers]
    model: str


def read_layer_trace(run: Path) -> dict[int, Update]:
    """The recorded updates of a run by number, as far as all ranks' files are there; empty without any."""
    files: dict[int, dict[int, _TraceFile]] = {}
    for step, rank, path in _paths(run):
        files.setdefault(step, {})[rank] = _read(path)
    updates = {}
    for step in sorted(files):
        by_rank = files[step]
        # Their number first: a file may claim any.
        whole = len(by_rank) == by_rank[min(by_rank)].ranks
        if not whole or sorted(by_rank) != list(range(len(by_rank))):
            break  # the run was ended while it wrote, or a machine's files were not copied
        updates[step] = _joined([by_rank[rank] for rank in sorted(by_rank)], run)
    return updates


def _paths(run: Path) -> Iterator[tuple[int, int, Path]]:
    directory = run / "layer_trace"
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise DataError(f"{directory} cannot be read ({error.strerror or error})") from error
    if len(names) > _MAX_FILES:
        raise DataError(f"{directory}: more than {_MAX_FILES} files; keep those of the first steps")
    for name in names:
        if match := _FILE.fullmatch(name):
            yield int(match[1]), int(match[2]), inside(run, f"layer_trace/{name}")


def _read(path: Path) -> _TraceFile:
    try:
        facts = os.stat(path)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX_BYTES:
            raise DataError(f"{path}: not a regular file of at most {_MAX_BYTES >> 20} MiB")
        with safe_open(path, "np") as file:
            return _checked(path, file)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read ({clipped(str(error))}): copy it again") from error


def _checked(path: Path, file: Any) -> _TraceFile:
    metadata, present = file.metadata() or {}, set(file.keys())

    def fact(name: str, kind: type) -> Any:
        try:
            value = parse_json(metadata[name])
        except (KeyError, ValueError):
            value = None
        if type(value) is not kind:
            raise DataError(f"{path}: '{name}' of its metadata is missing or no {kind.__name__}")
        return value

    def tensor(name: str, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        if name not in present:
            raise DataError(f"{path}: no '{name}' in it")
        part = file.get_slice(name)
        shape_there = part.get_shape()
        if part.get_dtype() != dtype or tuple(shape_there) != shape:
            raise DataError(
                f"{path}: '{name}' is {part.get_dtype()} {shape_there}, which is not a layer trace's"
            )
        return np.asarray(file.get_tensor(name))

    if fact("format", int) != FORMAT:
        raise DataError(f"{path}: written by another version of isotrain; record both runs with this one")
    names = {kind: _names(path, kind, fact("names", dict).get(kind)) for kind in KINDS}
    digests = fact("digests", dict)
    if any(not isinstance(digests.get(name), str) for name in DIGESTS):
        raise DataError(f"{path}: digests of the data are missing")
    sketches = {
        kind: tensor(f"{kind}/sketch", "F64", (len(names[kind]), _BUCKETS, _BUCKETS)) for kind in KINDS
    }
    shapes = {kind: tensor(f"{kind}/shape", "I64", (len(names[kind]), 2)) for kind in KINDS}
    if any((shape < 0).any() or (shape > 1 << 40).any() for shape in shapes.values()):
        raise DataError(f"{path}: shapes that no matrix has")
    return _TraceFile(
        fact("ranks", int),
        {name: digests[name] for name in DIGESTS},
        float(tensor("loss", "F64", (1,))[0]),
        names,
        sketches,
        {kind: tensor(f"{kind}/norm", "F64", (len(names[kind]),)) for kind in KINDS},
        shapes,
        tensor("weight/norm", "F64", (len(names["update"]),)),
        tensor(_RECOMPUTED, "F64", (len(names["update"]), 3)) if _RECOMPUTED in present else None,
        _by_layer(path, file, names["activation"], "route/", "I32"),
        _by_layer(path, file, names["activation"], "score/", "F64"),
        str(digests.get("model", "")),
    )


def _by_layer(path: Path, file: Any, layers: list[str], prefix: str, dtype: str) -> dict[str, Any]:
    """Tables with a row for each token, in the order in which their layers were computed."""
    present, tables = set(file.keys()), {}
    for name in layers:
        if prefix + name in present:
            part = file.get_slice(prefix + name)
            if part.get_dtype() != dtype or len(part.get_shape()) != 2 or not part.get_shape()[1]:
                raise DataError(f"{path}: '{clipped(prefix + name)}' is no table of experts")
            tables[name] = np.asarray(file.get_tensor(prefix + name))
    return tables


def _names(path: Path, kind: str, names: Any) -> list[str]:
    if not isinstance(names, list) or not all(
        isinstance(name, str) and 0 < len(name) <= _MAX_NAME and name.isprintable() for name in names
    ):
        raise DataError(f"{path}: names of {kind}s are missing, or no names")
    if len(set(names)) < len(names):
        raise DataError(f"{path}: a {kind} is in it twice")
    return names


def _joined(files: list[_TraceFile], run: Path) -> Update:
    first = files[0]

    def layout(file: _TraceFile) -> tuple[object, ...]:
        widths = [{n: table.shape[1] for n, table in t.items()} for t in (file.routes, file.scores)]
        return file.names, file.ranks, widths

    if any(layout(file) != layout(first) for file in files):
        raise DataError(f"{run / 'layer_trace'}: its ranks recorded different layers; record the run again")
    kinds = {
        kind: {name: _entry(files, kind, number) for number, name in enumerate(first.names[kind])}
        for kind in KINDS
    }
    # Losses are shares of one mean, so they add up.
    return Update(
        tuple(file.digests for file in files),
        math.fsum(file.loss for file in files),
        kinds,
        _recomputed(files),
        {name: np.concatenate([f.routes[name] for f in files]) for name in first.routes},
        {name: np.concatenate([f.scores[name] for f in files]) for name in first.scores},
        first.model,
    )


def _recomputed(files: list[_TraceFile]) -> dict[str, Recomputed]:
    tables = [file.recomputed_P3 for file in files if file.recomputed_P3 is not None]
    if len(tables) < len(files):
        return {}
    worst = {}
    for number, name in enumerate(files[0].names["update"]):
        # What is no number is as far off as can be.
        rows = [[float(x) if math.isfinite(x) else math.inf for x in table[number]] for table in tables]
        worst[name] = Recomputed(*max(rows))
    return worst


def _entry(files: list[_TraceFile], kind: str, number: int) -> TraceEntry:
    return TraceEntry(
        np.stack([file.sketches[kind][number] for file in files]),
        math.hypot(*(float(file.norms[kind][number]) for file in files)),
        tuple((int(rows), int(columns)) for rows, columns in (f.shapes[kind][number] for f in files)),
        math.hypot(*(float(f.weight_norms[number]) for f in files)) if kind == "update" else math.nan,
    )
