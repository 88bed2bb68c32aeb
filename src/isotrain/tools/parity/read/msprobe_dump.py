"""msprobe's dump of a training step: statistics of every tensor that a module or an API took or gave.

The tensors themselves, which a dump of task `tensor` has beside them, are not opened.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isotrain.errors import DataError
from isotrain.tools.parity.read.bounded import Source, clipped, inside, sha256_of
from isotrain.tools.parity.run import RunLog

DUMP, CONSTRUCT = "dump.json", "construct.json"
FORMAT = "msprobe dump"
EXACT = ("int", "float", "bool", "torch.dtype")
"""Types of arguments that are compared: others name devices, groups and objects."""

Direction = Literal["forward", "backward", "parameters_grad"]
"""The last is what a module's backward gives its own weights."""
_MODULE = re.compile(
    r"Module\.(?P<what>.+)\.(?P<of>[^.]+)\.(?P<way>forward|backward|parameters_grad)\.(?P<number>[0-9]{1,9})"
)
_API = re.compile(r"(?P<what>[A-Za-z]+\..+)\.(?P<number>[0-9]{1,9})\.(?P<way>forward|backward)")
_STEP = re.compile(r"step_?([0-9]{1,12})")
_PROCESS = re.compile(r"proc[0-9]+")
_WRAPPERS = re.compile(r"(?<![^.])(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)\.")
_TENSORS = "dump_tensor_data"

_MAX_BYTES, _MAX_FILES, _MAX_ENTRIES, _MAX_DEPTH = 256 << 20, 1_000, 100_000, 6
_MAX_CALLS, _MAX_TENSORS, _MAX_NESTING, _MAX_NAME = 500_000, 2_000, 16, 500


@dataclass(frozen=True)
class Tensor:
    """Four numbers of a tensor, each None where msprobe has none."""

    place: str
    """Where it is in the call: `0`, `hidden_states`, `1.0`."""
    dtype: str
    shape: tuple[int, ...]
    maximum: float | None
    minimum: float | None
    mean: float | None
    norm: float | None
    checksum: str | None

    @property
    def is_floating(self) -> bool:
        return "float" in self.dtype

    @property
    def is_integer(self) -> bool:
        return "int" in self.dtype

    @property
    def has_statistics(self) -> bool:
        return self.maximum is not None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Call:
    """One forward or backward of a module or an API, or the gradients of a module's weights."""

    is_module: bool
    what: str
    """`model.layers.1.self_attn`, or `Functional.linear`."""
    type_name: str
    """A module's class."""
    direction: Direction
    number: int
    """How often it was called before in this direction."""
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    arguments: Mapping[str, float | str]
    """Arguments besides tensors."""
    parent: str | None
    """The module that an API was called in, where the dump tells."""


@dataclass(frozen=True)
class Place:
    """One file of a dump: of a step, and where there are several, of a stage and a rank."""

    step: int
    label: str
    parts: tuple[str, ...]
    """The directories that lead to it, without the number of a process."""
    directory: Path


@dataclass(frozen=True)
class DumpedStep:
    level: str
    calls: tuple[Call, ...]
    """In the order in which they ended."""

    @property
    def has_statistics(self) -> bool:
        return any(tensor.has_statistics for call in self.calls for tensor in (*call.outputs, *call.inputs))


def is_msprobe_dump(path: Path) -> bool:
    return next(_directories(path), None) is not None


def read_msprobe_dump(path: Path) -> RunLog:
    """As a run without curves; its files are read where levels are computed."""
    names = [str(Path(*place.parts_on_disk, DUMP)) for place in _found(path)]
    return RunLog(path, FORMAT, {}, sha256={name: sha256_of(path, name) for name in names})


def places(path: Path) -> list[Place]:
    """The files of a dump in the order of their steps."""
    dumps = _found(path)
    keys: dict[tuple[str, ...], Path] = {}
    for dump in dumps:
        if dump.parts in keys:
            raise DataError(
                f"{path}: several processes dumped beside each other without ranks "
                f"({clipped('/'.join(dump.parts_on_disk))}); give the directory of one"
            )
        keys[dump.parts] = path.joinpath(*dump.parts_on_disk)
    everywhere = set.intersection(*(set(parts) for parts in keys)) if keys else set()
    placed = []
    for parts, directory in keys.items():
        steps = [number for part in parts if (number := _STEP.fullmatch(part))]
        outer = steps[0][0] if steps else None
        label = " ".join(part for part in parts if part != outer and part not in everywhere)
        placed.append(Place(int(steps[0][1]) if steps else 0, label, parts, directory))
    return sorted(placed, key=lambda place: (place.step, place.parts))


def read_part(place: Place) -> DumpedStep:
    source = Source(inside(place.directory, DUMP), DUMP)
    content = source.json_object(_MAX_BYTES)
    data = content.get("data")
    if not isinstance(data, dict):
        raise source.error(
            'no object "data" in it; is it a dump of msprobe\'s task statistics or tensor, framework pytorch?'
        )
    if len(data) > _MAX_CALLS:
        raise source.error(f"more than {_MAX_CALLS} calls; dump fewer steps or a scope")
    parents = _parents(place.directory)
    calls = []
    for name, content_of_call in data.items():
        call = _call(source, name, content_of_call, parents.get(name))
        if call is not None:
            calls.append(call)
    if not calls:
        raise source.error("no module and no API in it; was the step dumped to its end?")
    return DumpedStep(str(content.get("level"))[:20], tuple(calls))


@dataclass(frozen=True)
class _Found:
    parts_on_disk: tuple[str, ...]
    parts: tuple[str, ...]


def _found(path: Path) -> list[_Found]:
    dumps: list[_Found] = []
    for on_disk in _directories(path):
        if len(dumps) == _MAX_FILES:
            raise DataError(f"{path}: more than {_MAX_FILES} dumps; give the directory of some steps")
        # A single process has no rank; on the other side there may be a rank 0 in its place.
        parts = tuple("rank0" if _PROCESS.fullmatch(part) else part for part in on_disk)
        dumps.append(_Found(on_disk, parts))
    return sorted(dumps, key=lambda dump: dump.parts_on_disk)


def _directories(path: Path) -> Iterator[tuple[str, ...]]:
    """Directories below `path` with a dump in them, as parts of their paths; links are not followed."""
    waiting: list[tuple[str, ...]] = [()]
    seen = 0
    while waiting:
        parts = waiting.pop()
        try:
            entries = sorted(os.scandir(path.joinpath(*parts)), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"{path.joinpath(*parts)} cannot be read ({error.strerror or error})") from error
        for entry in entries:
            seen += 1
            if seen > _MAX_ENTRIES:
                raise DataError(f"{path}: more than {_MAX_ENTRIES} files; give the directory of some steps")
            if entry.name == DUMP and entry.is_file():
                yield parts
            elif entry.name != _TENSORS and len(parts) < _MAX_DEPTH and entry.is_dir(follow_symlinks=False):
                waiting.append((*parts, entry.name))


def _parents(directory: Path) -> dict[str, str]:
    """The module that each API was called in; empty where the dump does not tell."""
    if not (directory / CONSTRUCT).exists():
        return {}
    source = Source(inside(directory, CONSTRUCT), CONSTRUCT)
    parents = {}
    for name, parent in source.json_object(_MAX_BYTES).items():
        # With pipelines, the number of the micro-batch is beside the module.
        first = parent[0] if isinstance(parent, list) and parent else parent
        module = _MODULE.fullmatch(first) if isinstance(first, str) and len(first) <= _MAX_NAME else None
        if module:
            parents[name] = _plain(module["what"])
    return parents


def _plain(name: str) -> str:
    return _WRAPPERS.sub("", name)


def _call(source: Source, name: str, content: Any, parent: str | None) -> Call | None:
    if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise source.error(f"a call has no name: {clipped(name)}")
    module = _MODULE.fullmatch(name)
    matched = module or (None if name.startswith("Module.") else _API.fullmatch(name))
    if matched is None:
        return None  # what another version of msprobe adds
    if not isinstance(content, dict):
        raise source.error(f"{clipped(name)} is no object")
    reader = _Reader(source, name)
    inputs = reader.tensors(content, "input_args", "input_kwargs", "input")
    way: Direction = matched["way"]  # type: ignore[assignment]
    outputs = reader.tensors(content, *(content if way == "parameters_grad" else ["output"]))
    weights = reader.tensors(content, "parameters")
    what = _plain(matched["what"]) if module else matched["what"]
    number = int(matched["number"])
    type_name = matched["of"] if module else ""
    tensors = (inputs, outputs, weights)
    return Call(bool(module), what, type_name, way, number, *tensors, reader.arguments, parent)


class _Reader:
    """The tensors and arguments of one call."""

    def __init__(self, source: Source, name: str) -> None:
        self._source, self._name = source, name
        self._count = 0
        self.arguments: dict[str, float | str] = {}

    def tensors(self, call: Mapping[str, Any], *names: str) -> tuple[Tensor, ...]:
        return tuple(tensor for name in names for tensor in self._walk(call.get(name), (), 0))

    def _walk(self, content: Any, place: tuple[str, ...], depth: int) -> Iterator[Tensor]:
        if depth > _MAX_NESTING:
            raise self._error("is nested too deeply")
        if isinstance(content, dict):
            kind = content.get("type")
            if "shape" in content and "dtype" in content and isinstance(kind, str):
                yield self._tensor(content, ".".join(place))
            elif isinstance(kind, str) and "value" in content:
                self._argument(kind, content["value"], ".".join(place))
            else:
                for name, inner in content.items():
                    yield from self._walk(inner, (*place, name[:_MAX_NAME]), depth + 1)
        elif isinstance(content, list):
            for number, inner in enumerate(content):
                yield from self._walk(inner, (*place, str(number)), depth + 1)

    def _argument(self, kind: str, value: Any, place: str) -> None:
        if kind not in EXACT:
            return
        if isinstance(value, str):
            self.arguments[place] = value[:_MAX_NAME]
        elif isinstance(value, int | float) and abs(value) < 2**53:
            self.arguments[place] = float(value)

    def _tensor(self, content: Mapping[str, Any], place: str) -> Tensor:
        self._count += 1
        if self._count > _MAX_TENSORS:
            raise self._error(f"has more than {_MAX_TENSORS} tensors")
        shape, checksum = content["shape"], content.get("md5")
        if not isinstance(shape, list) or not all(
            type(size) is int and 0 <= size < 2**40 for size in shape[:_MAX_NESTING]
        ):
            raise self._error("has a shape that no tensor has")
        largest, smallest, mean, norm = (
            self._number(content.get(name)) for name in ("Max", "Min", "Mean", "Norm")
        )
        return Tensor(
            place,
            str(content["dtype"]).removeprefix("torch.")[:40],
            tuple(shape[:_MAX_NESTING]),
            largest,
            smallest,
            mean,
            norm,
            checksum[:64] if isinstance(checksum, str) else None,
        )

    def _number(self, value: Any) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool | int | float):
            try:
                return float(value)
            except OverflowError:
                return math.inf
        raise self._error("has a statistic that is no number")

    def _error(self, reason: str) -> DataError:
        return self._source.error(f"{clipped(self._name)} {reason}")


def common_places(a: Sequence[Place], b: Sequence[Place]) -> list[tuple[Place, Place]]:
    """Steps, stages and ranks that both dumps have."""
    others = {place.parts: place for place in b}
    return [(place, others[place.parts]) for place in a if place.parts in others]
