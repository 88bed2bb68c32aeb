"""Runs that come with isotrain, so that the owner of one device has something to compare with.

`python -m isotrain.tools.parity.certify.reference_runs WORK NAME` takes one over from the directory of a
`parity certify`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.errors import DataError
from isotrain.observe.run_directory import RunDirectory, write_atomically
from isotrain.recipe.load import path_override
from isotrain.tools.parity.certify.issue import portable

FOLDER = Path(__file__).parents[1] / "reference_data"
TINY = FOLDER / "tiny"
_TRACES = ("layer_trace", "score_tests", "trajectories")
# Two traced steps show how rounding grows over an update; each is most of a megabyte.
_LATER = shutil.ignore_patterns("step-000003-rank-*.safetensors")


@dataclass(frozen=True)
class ReferenceRun:
    name: str
    path: Path

    @property
    def members(self) -> list[Path]:
        """Runs of it that only round differently."""
        return sorted(path for path in (self.path / "members").iterdir() if path.is_dir())

    def settings(self) -> list[str]:
        """Changes to its recipe with which it finds its model and data on this machine."""
        recipe = json.loads(RunDirectory(self.path).resolved.read_text(encoding="utf-8"))
        overrides = [
            path_override("model.path", TINY / "model"),
            path_override("data.train", TINY / Path(recipe["data"]["train"]).name),
        ]
        if recipe.get("rollout") is not None:
            # Scores are recorded too: the reward function keeps the path that it had there, and is not read.
            overrides.append(path_override("rollout.replay", self.path))
        return overrides


def reference_runs() -> dict[str, ReferenceRun]:
    paths = (path.parent for path in sorted(FOLDER.glob("*/metrics.jsonl")))
    return {path.name: ReferenceRun(path.name, path) for path in paths}


def find_reference(name: str) -> ReferenceRun:
    known = reference_runs()
    if name not in known:
        raise DataError(f"{name!r} is no reference run; there are {', '.join(known)}")
    return known[name]


def take_over(work: Path, name: str, folder: Path = FOLDER) -> None:
    """Copy what a comparison reads of a reference and its members, without paths of this machine."""
    target = folder / name
    if target.exists():
        raise DataError(f"{target} is there already; delete it to make it anew")
    _copy(work / "reference", target)
    for kind in _TRACES:
        if (work / "reference" / kind).is_dir():
            shutil.copytree(work / "reference" / kind, target / kind, ignore=_LATER)
    for number, member in enumerate(sorted(work.glob("member-*/metrics.jsonl")), start=1):
        _copy(member.parent, target / "members" / str(number))


def _copy(run: Path, target: Path) -> None:
    target.mkdir(parents=True)
    source, copy = RunDirectory(run), RunDirectory(target)
    shutil.copyfile(source.metrics, copy.metrics)
    _write(copy.resolved, portable(json.loads(source.resolved.read_text(encoding="utf-8"))))
    starts = [{k: v for k, v in start.items() if k != "command"} for start in source.starts()]
    _write(copy.environment, {"starts": portable(starts)})


def _write(path: Path, content: Any) -> None:
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    work, name = sys.argv[1:] if arguments is None else arguments
    take_over(Path(work), name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
