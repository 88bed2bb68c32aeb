"""Training runs in processes of their own, each under the variables of the device that it is to use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isotrain.errors import LaunchError

_LAST_WORDS = 12


@dataclass(frozen=True)
class Side:
    """One of the two ways to compute that are compared."""

    label: str
    settings: tuple[str, ...]
    """Changes to the recipe, such as the device's type."""
    variables: Mapping[str, str]


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
        output, log = self.work / name, self.work / f"{name}.log"
        self.tell(f"{why}: {self.recipe} on {side.label}")
        command = [
            *(sys.executable, "-m", "isotrain", "train", self.recipe),
            *self.settings,
            *side.settings,
            *settings,
            f"output={output}",
        ]
        started = time.monotonic()
        self.work.mkdir(parents=True, exist_ok=True)
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
        return Finished(output, time.monotonic() - started)
