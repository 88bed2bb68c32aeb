"""Access to a machine, this one or a recorded one: files, commands, packages, variables, disk space.

A recorded machine is a folder, to be examined elsewhere:

machine.json      machine, python, packages, variables, free bytes by path, paths that were found
files/...         files that were read, under their own paths
packages/...      files of installed packages that were read
commands/*.txt    `exit N`, then what the command wrote
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import importlib.metadata
import importlib.util
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
from pydantic import BaseModel, ConfigDict, Field

from isotrain.errors import DataError
from isotrain.observe.environment import SECRET, URL_CREDENTIALS

LONGEST = 1 << 20
# Nothing else of the environment is read, shown or recorded.
_VARIABLES = re.compile(
    r"(ASCEND|ATB|CUDA|HCCL|HF|LCCL|NCCL|OMP|PYTORCH|RAY_EXPERIMENTAL|TORCH|TRANSFORMERS|VLLM)_\w*"
    r"|CLOSE_MATMUL_K_SHIFT|INF_NAN_MODE_ENABLE|LD_LIBRARY_PATH|NPU_\w*|PYTHONHASHSEED"
)


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

    def read_in_package(self, package: str, name: str) -> str | None:
        """The start of a file of an installed package, which is not imported; None without one."""

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

    def read_in_package(self, package: str, name: str) -> str | None:
        with contextlib.suppress(ImportError, ValueError):
            if spec := importlib.util.find_spec(package):
                for folder in spec.submodule_search_locations or ():
                    return self.read(f"{folder}/{name}")
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


def relevant(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that training depends on, without anything that may be a secret."""
    return {
        name: URL_CREDENTIALS.sub("***@", value)
        for name, value in sorted(variables.items())
        if _VARIABLES.fullmatch(name) and not SECRET.search(name)
    }


def command_name(command: Sequence[str]) -> str:
    """Name of the file that keeps a command's output."""
    return re.sub(r"[^\w.-]+", "_", " ".join(command)) + ".txt"


class _Described(BaseModel):
    """Content of `machine.json`."""

    model_config = ConfigDict(strict=True)

    machine: str
    python: str
    packages: dict[str, str] = Field(default_factory=dict)
    variables: dict[str, str] = Field(default_factory=dict)
    free: dict[str, int | None] = Field(default_factory=dict)
    found: list[str] = Field(default_factory=list)


class RecordedMachine:
    """Reads from a folder that may come from anybody: it reads nothing outside."""

    def __init__(self, folder: Path) -> None:
        try:
            self._folder = folder.resolve()
            text = self._text("machine.json")
            if text is None:
                raise ValueError("it has no machine.json")
            self._described = _Described.model_validate_json(text)
            for version in [self._described.python, *self._described.packages.values()]:
                Version(version)
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links; pydantic's, packaging's
            raise DataError(f"{folder}: not a recorded machine: {error}") from None
        self.machine, self.python = self._described.machine, self._described.python
        self.variables: Mapping[str, str] = self._described.variables

    def packages(self, names: Sequence[str]) -> dict[str, str]:
        return {name: self._described.packages[name] for name in names if name in self._described.packages}

    def read(self, path: str) -> str | None:
        return self._text(f"files/{path.lstrip('/')}")

    def read_in_package(self, package: str, name: str) -> str | None:
        return self._text(f"packages/{package}/{name}")

    def find(self, pattern: str) -> list[str]:
        pattern_parts = pattern.split("/")
        return sorted(
            path
            for path in self._described.found
            if len(parts := path.split("/")) == len(pattern_parts)
            and all(map(fnmatch.fnmatchcase, parts, pattern_parts))
        )

    def run(self, command: Sequence[str], timeout: float) -> Output | None:
        text = self._text(f"commands/{command_name(command)}")
        if text is None:
            return None
        head, _, said = text.partition("\n")
        code = re.fullmatch(r"exit (-?[0-9]{1,5})", head)
        return Output(int(code[1]) if code else -1, said)

    def free(self, path: str) -> int | None:
        return self._described.free.get(path)

    def _text(self, name: str) -> str | None:
        """The start of a file of the folder; links that lead out of it are not followed."""
        try:
            kept = (self._folder / name).resolve()
            if not kept.is_relative_to(self._folder) or not kept.is_file():
                return None
            with kept.open(encoding="utf-8", errors="replace") as file:
                return file.read(LONGEST)
        except (OSError, RuntimeError, ValueError):  # a loop of links; a name with a zero byte
            return None


class Recording:
    """Passes on what a machine returns, and saves it in a folder."""

    def __init__(self, system: System, folder: Path) -> None:
        self._system = system
        self._folder = folder
        self.machine = system.machine
        self.python = system.python
        variables = relevant(system.variables)
        self.variables: Mapping[str, str] = variables
        self._described = _Described(machine=self.machine, python=self.python, variables=variables)

    def packages(self, names: Sequence[str]) -> dict[str, str]:
        versions = self._system.packages(names)
        self._described.packages |= versions
        self._save()
        return versions

    def read(self, path: str) -> str | None:
        text = self._system.read(path)
        if text is not None:
            self._keep("files" + path, _listening(text) if path.startswith("/proc/net/") else text)
        return text

    def read_in_package(self, package: str, name: str) -> str | None:
        text = self._system.read_in_package(package, name)
        if text is not None:
            self._keep(f"packages/{package}/{name}", text)
        return text

    def find(self, pattern: str) -> list[str]:
        paths = self._system.find(pattern)
        self._described.found += [path for path in paths if path not in self._described.found]
        self._save()
        return paths

    def run(self, command: Sequence[str], timeout: float) -> Output | None:
        output = self._system.run(command, timeout)
        if output is not None:
            self._keep("commands/" + command_name(command), f"exit {output.code}\n{output.text}")
        return output

    def free(self, path: str) -> int | None:
        free = self._system.free(path)
        self._described.free[path] = free
        self._save()
        return free

    def _keep(self, name: str, text: str) -> None:
        file = (self._folder / name).resolve()
        # A variable may hold a path that climbs: such a file is used and not kept.
        if file.is_relative_to(self._folder.resolve()):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

    def _save(self) -> None:
        self._keep("machine.json", self._described.model_dump_json(indent=2) + "\n")


def _listening(table: str) -> str:
    """Rows of the kernel's table of sockets that are looked at: listeners, without their addresses."""
    head, *rows = table.splitlines(keepends=True)
    listening = (row for row in rows if " 0A " in row)
    address = re.compile(r"(?<=: )[0-9A-F]+(?=:)")
    return "".join([head, *(address.sub(lambda match: "0" * len(match[0]), row, 1) for row in listening)])
