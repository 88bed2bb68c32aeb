"""A machine as a folder of files and command outputs, to be examined somewhere else.

machine.json      machine, python, packages, variables, free bytes by path, paths that were found
files/...         files that were read, under their own paths
commands/*.txt    `exit N`, then what the command wrote
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.doctor.facts import relevant
from isotrain.doctor.system import Output, System, command_name
from isotrain.errors import DataError


class RecordedMachine:
    """Answers from a folder. The folder may be anybody's: nothing outside it is read."""

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        self._commands = folder / "commands"
        try:
            described = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{folder}: not a recorded machine: {error}") from None
        self.machine = _text(described, "machine", folder)
        self.python = _text(described, "python", folder)
        self._packages = _texts(described, "packages", folder)
        self.variables: Mapping[str, str] = _texts(described, "variables", folder)
        self._free = described.get("free") or {}
        self._found = [str(path) for path in described.get("found") or ()]

    def packages(self, names: Sequence[str]) -> dict[str, str]:
        return {name: self._packages[name] for name in names if name in self._packages}

    def read(self, path: str) -> str | None:
        kept = (self._files / path.lstrip("/")).resolve()
        if not kept.is_relative_to(self._files.resolve()) or not kept.is_file():
            return None
        return kept.read_text(encoding="utf-8", errors="replace")

    def find(self, pattern: str) -> list[str]:
        wanted = pattern.split("/")
        return sorted(
            path
            for path in self._found
            if len(parts := path.split("/")) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
        )

    def run(self, command: Sequence[str], timeout: float) -> Output | None:
        kept = self._commands / command_name(command)
        if not kept.is_file():
            return None
        head, _, text = kept.read_text(encoding="utf-8", errors="replace").partition("\n")
        code = head.removeprefix("exit ")
        return Output(int(code), text) if code.lstrip("-").isdigit() else Output(-1, text)

    def free(self, path: str) -> int | None:
        free = self._free.get(path)
        return free if isinstance(free, int) else None


class Recording:
    """Passes on what a machine answers, and keeps it in a folder."""

    def __init__(self, system: System, folder: Path) -> None:
        self._system = system
        self._folder = folder
        self.machine = system.machine
        self.python = system.python
        self.variables: Mapping[str, str] = relevant(system.variables)
        self._described: dict[str, Any] = {
            "machine": self.machine,
            "python": self.python,
            "packages": {},
            "variables": dict(self.variables),
            "free": {},
            "found": [],
        }

    def packages(self, names: Sequence[str]) -> dict[str, str]:
        found = self._system.packages(names)
        self._described["packages"] |= found
        self._save()
        return found

    def read(self, path: str) -> str | None:
        text = self._system.read(path)
        if text is not None:
            self._keep("files" + path, text)
        return text

    def find(self, pattern: str) -> list[str]:
        found = self._system.find(pattern)
        self._described["found"] += [path for path in found if path not in self._described["found"]]
        self._save()
        return found

    def run(self, command: Sequence[str], timeout: float) -> Output | None:
        output = self._system.run(command, timeout)
        if output is not None:
            self._keep("commands/" + command_name(command), f"exit {output.code}\n{output.text}")
        return output

    def free(self, path: str) -> int | None:
        free = self._system.free(path)
        self._described["free"][path] = free
        self._save()
        return free

    def _keep(self, name: str, text: str) -> None:
        file = (self._folder / name).resolve()
        # A variable may hold a path that climbs: such a file is used and not kept.
        if file.is_relative_to(self._folder.resolve()):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")

    def _save(self) -> None:
        self._keep("machine.json", json.dumps(self._described, indent=2) + "\n")


def _text(described: Any, name: str, folder: Path) -> str:
    value = described.get(name) if isinstance(described, dict) else None
    if not isinstance(value, str):
        raise DataError(f"{folder}/machine.json: {name!r} should be a text")
    return value


def _texts(described: dict[str, Any], name: str, folder: Path) -> dict[str, str]:
    values = described.get(name) or {}
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise DataError(f"{folder}/machine.json: {name!r} should be names with texts")
    return values
