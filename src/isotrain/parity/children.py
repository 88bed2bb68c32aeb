"""Training runs in processes of their own, each under the variables of the device that it is to use."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.errors import LaunchError
from isotrain.observe.run_directory import write_atomically
from isotrain.own_python import module_command
from isotrain.recipe.load import other_run

_LAST_WORDS = 12


@dataclass(frozen=True)
class Side:
    """One of the two ways to compute that are compared."""

    label: str
    settings: tuple[str, ...]
    """Changes to the recipe, such as the device's type."""
    variables: Mapping[str, str]
    traced: bool = True
    """Whether its runs can record layers and operators: those of a mesh are divided over ranks."""


@dataclass(frozen=True)
class Finished:
    path: Path
    seconds: float


@dataclass(frozen=True)
class Children:
    recipe: str
    """A file, or a name of the library."""
    settings: tuple[str, ...]
    work: Path
    tell: Callable[[str], None]
    time_limit: float

    def train(self, name: str, side: Side, settings: Sequence[str] = (), *, why: str) -> Finished:
        """One run of the recipe; what was finished before is not run again."""
        output, log, note = (self.work / f"{name}{ending}" for ending in ("", ".log", ".json"))
        self.work.mkdir(parents=True, exist_ok=True)
        changes = [*self.settings, *side.settings, *settings]
        how = {
            "recipe": self.recipe,
            "settings": changes,
            "label": side.label,
            "variables": {**side.variables},
        }
        before = _read(note) if output.exists() else {}
        if output.exists() and {key: before.get(key) for key in how} != how:
            # It would be finished here, and its curves taken for those of this device.
            raise LaunchError(f"{output} was run in another way (see {note}); choose another --work")
        # Before the run: one that is stopped on the way must not be finished on another device.
        write_atomically(note, json.dumps({"seconds": 0.0, **before, **how}, indent=1) + "\n")
        self.tell(f"{why}: {Path(self.recipe).stem} on {side.label}")
        begun = time.monotonic()
        self._run(name, side, [*changes, *other_run(output)], log)
        spent = time.monotonic() - begun + float(before.get("seconds", 0.0))
        write_atomically(note, json.dumps({**how, "seconds": spent}, indent=1) + "\n")
        return Finished(output, spent)

    def _run(self, name: str, side: Side, settings: Sequence[str], log: Path) -> None:
        command = module_command("isotrain", "train", self.recipe, *settings)
        with log.open("wb") as file:
            try:
                done = subprocess.run(
                    command,
                    env={**os.environ, **side.variables},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=self.time_limit,
                )
            except subprocess.TimeoutExpired:
                raise LaunchError(f"{name}: no end within {self.time_limit:.0f} s; see {log}") from None
        if done.returncode:
            said = log.read_text(errors="replace").strip().splitlines()[-_LAST_WORDS:]
            raise LaunchError(f"{name} on {side.label} failed (all of it in {log}):\n" + "\n".join(said))


def _read(note: Path) -> dict[str, Any]:
    """How an earlier run of that name was made."""
    try:
        content = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
