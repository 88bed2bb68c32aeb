"""isotrain's own run directory: metrics.jsonl, resolved.json and the last start of environment.json.

Its metrics are exact through every resume, so a step that comes twice is damage and not a resume.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from isotrain.observe.run_directory import RunDirectory
from isotrain.parity.run import Run, section
from isotrain.parity.sources.bounded import Source, clipped, inside
from isotrain.parity.sources.columns import Columns
from isotrain.parity.sources.json_lines import objects, value_of
from isotrain.recipe.difference import changes

_MAX_FACTS = 64 << 20
# What makes it another device; `rollout` is beside them in online runs.
_OF_DEVICE = ("type", "name", "ranks", "mesh", "determinism")
# They hold a processor below its best instructions, which makes it another device to `parity certify`.
INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


def is_isotrain_run(path: Path) -> bool:
    return RunDirectory(path).metrics.is_file()


def read_isotrain_run(path: Path) -> Run:
    run = RunDirectory(path)
    source = Source(inside(path, run.metrics.name))
    columns = Columns(source)
    for line, row in objects(source):
        step = row.pop("step", None)
        if isinstance(step, bool) or not isinstance(step, int) or not -(2**63) <= step < 2**63:
            raise source.error(f"`step` is not a whole number: {clipped(str(step))}", line)
        metrics = []
        for name, value in row.items():
            found = value if type(value) is float else value_of(value)
            if found is None:
                raise source.error(f"{clipped(name)} is not a number: {clipped(str(value))}", line)
            metrics.append((name, found))
        columns.add_row(step, metrics, line)
    curves = columns.run("isotrain run", "has the run taken a step?")
    digests = dict(source.sha256)
    recipe = _facts(path, run.resolved.name, digests)
    environment, data = _last_start(path, run.environment.name, digests)
    return replace(curves, path=path, recipe=recipe, environment=environment, data=data, sha256=digests)


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
    """What a start tells of the device that it computed on."""
    device, variables, host = (section(start, name) for name in ("device", "variables", "cpu"))
    own = {name: device.get(name) for name in _OF_DEVICE}
    if device.get("type") == "cpu":
        own |= {name: variables.get(name) for name in INSTRUCTIONS} | {"features": host.get("features")}
    return own


def _facts(path: Path, name: str, digests: dict[str, str]) -> dict[str, Any] | None:
    """A JSON object of the directory; None where the file is not there, as in a copy of the curves alone."""
    if not (path / name).exists():
        return None
    source = Source(inside(path, name))
    content = source.json_object(_MAX_FACTS)
    digests.update(source.sha256)
    return content
