"""Access to a machine: files, commands, packages, variables, disk space."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from packaging.version import InvalidVersion, Version

LONGEST = 1 << 20


@dataclass(frozen=True)
class Output:
    """How a command ended, and what it wrote to both streams."""

    code: int
    text: str


class System(Protocol):
    """A machine, this one or a recorded one."""

    machine: str
    """Output of `uname -m`."""
    python: str
    """The version of Python that training would run on."""
    variables: Mapping[str, str]
    """Environment variables."""

    def packages(self, names: Sequence[str]) -> dict[str, str]:
        """Versions of those packages that are installed with one that can be read."""

    def read(self, path: str) -> str | None:
        """The start of a file; None where it cannot be read."""

    def find(self, pattern: str) -> list[str]:
        """Paths that match a shell pattern, sorted."""

    def run(self, command: Sequence[str], timeout: float) -> Output | None:
        """Output of a command; None where it is not installed. `python` is the one of `python`."""

    def free(self, path: str) -> int | None:
        """Free bytes on the file system that a path is or would be on."""


class ThisMachine:
    """The machine and environment that this process runs in."""

    machine = platform.machine()
    python = platform.python_version()
    variables: Mapping[str, str] = os.environ

    def packages(self, names: Sequence[str]) -> dict[str, str]:
        versions = {}
        for name in names:
            # Versions of builds by hand may be anything, and broken installations have none.
            with contextlib.suppress(importlib.metadata.PackageNotFoundError, InvalidVersion, TypeError):
                versions[name] = str(Version(importlib.metadata.version(name)))
        return versions

    def read(self, path: str) -> str | None:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(LONGEST)
        except OSError:
            return None

    def find(self, pattern: str) -> list[str]:
        return sorted(glob.glob(pattern))

    def run(self, command: Sequence[str], timeout: float) -> Output | None:
        program = sys.executable if command[0] == "python" else shutil.which(command[0])
        if program is None:
            return None
        try:
            done = subprocess.run(
                [program, *command[1:]],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return Output(-1, f"no reply within {timeout:.0f} s")
        except OSError as error:
            return Output(-1, str(error))
        return Output(done.returncode, (done.stdout + done.stderr)[:LONGEST])

    def free(self, path: str) -> int | None:
        nearest = Path(path).expanduser().absolute()
        for place in (nearest, *nearest.parents):
            if place.exists():
                return shutil.disk_usage(place).free
        return None


def command_name(command: Sequence[str]) -> str:
    """Name of the file that keeps a command's output."""
    return re.sub(r"[^\w.-]+", "_", " ".join(command)) + ".txt"
