"""A machine as a folder of files and command outputs, to be examined elsewhere.

machine.json      machine, python, packages, variables, free bytes by path, paths that were found
files/...         files that were read, under their own paths
commands/*.txt    `exit N`, then what the command wrote
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field

from isotrain.errors import DataError
from isotrain.tools.doctor.facts import relevant
from isotrain.tools.doctor.system import LONGEST, Output, System, command_name


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
