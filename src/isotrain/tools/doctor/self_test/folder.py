"""The folder that a self-test writes, small and without anything private, to be read anywhere.

self-test.json    what ran, on what, with which verdicts and metrics
logs/STAGE.txt    the end of the output of stages that failed, or did not end
machine/          versions, devices and variables, as `isotrain doctor --save` writes them
"""

from __future__ import annotations

import datetime
import getpass
import math
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

import isotrain
from isotrain.errors import DataError
from isotrain.observe.environment import SECRET, SECRET_ARGUMENT, URL_CREDENTIALS
from isotrain.tools.doctor.matrix import Target
from isotrain.tools.doctor.self_test.run import log_of, part_of
from isotrain.tools.doctor.self_test.verdicts import Outcome, StageVerdict

RESULTS, LOGS, MACHINE = "self-test.json", "logs", "machine"
LOG_LINES = 200
CONTENTS = (
    f"{RESULTS}   stages, verdicts, metrics, times",
    f"{LOGS}/            the last {LOG_LINES} lines of output of stages that fail or do not end",
    f"{MACHINE}/         what `isotrain doctor` examined: devices, driver, versions, their variables",
)
LARGEST_LOG = 200_000

# Secrets by their names, in logs that print an environment or a command.
_ASSIGNMENT = re.compile(r"(?P<name>[\w.-]{2,64})(?P<equals>['\"]?\s*[=:]\s*)(?P<value>['\"]?[^\s'\",;]{6,})")
_BEARER = re.compile(r"(?i)\b(bearer|hf_|sk-|ghp_)[\w.-]{8,}|(?<=bearer )\S+")
# Addresses of private networks, and others where a port follows: versions can look like addresses.
_NUMBERS = r"\d{1,3}\.\d{1,3}"
_PRIVATE = rf"10\.\d{{1,3}}\.{_NUMBERS}|192\.168\.{_NUMBERS}|172\.(?:1[6-9]|2\d|3[01])\.{_NUMBERS}"
_ADDRESS = re.compile(
    rf"(?<![\d.])(?!127\.|0\.0\.0\.0)(?:{_PRIVATE}|{_NUMBERS}\.{_NUMBERS}(?=:\d))(?!\.?\d)"
    r"|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}(?![\w:])"
)
_OPTION = re.compile(r"(?P<name>--[\w.-]{2,64})(?P<equals>\s+)(?P<value>[^\s'\",;-][^\s'\",;]*)")
# Names of machines that are words of the field stay: they would be replaced everywhere.
_SHORTEST_HOST = 5


class Results(BaseModel):
    """Content of `self-test.json`."""

    model_config = ConfigDict(strict=True, frozen=True, ser_json_inf_nan="constants")

    isotrain: str
    date: str
    device: Target
    engine: str
    simulated: bool
    seconds: float
    verdicts: list[StageVerdict]

    def as_json(self) -> dict[str, Any]:
        """For JSON as everybody reads it, which has no name for what is no number."""
        content: dict[str, Any] = self.model_dump(mode="json")
        for verdict in content["verdicts"]:
            metrics = verdict["metrics"].items()
            verdict["metrics"] = {n: v if math.isfinite(v) else str(v) for n, v in metrics}
        return content

    def any(self, outcome: Outcome) -> bool:
        return any(verdict.outcome == outcome for verdict in self.verdicts)


class Redactor:
    """Takes names of this machine, its user and its network out of a text."""

    def __init__(self, work: Path, hosts: Sequence[str] = ()) -> None:
        # In this order: a directory before the one above it.
        self._paths = {str(work): "WORK"}
        with suppress(RuntimeError, KeyError, OSError):  # a container's user need not have a home or a name
            if (home := str(Path.home())) != "/":
                self._paths[home] = "~"
            self._paths[f"/{getpass.getuser()}/"] = "/USER/"
        names = {socket.gethostname(), socket.getfqdn(), *hosts} - {"localhost"}
        whole = [rf"(?<![\w.-]){re.escape(name)}(?![\w-])" for name in names if len(name) >= _SHORTEST_HOST]
        self._host = re.compile("|".join(whole) or "(?!)")

    def __call__(self, text: str) -> str:
        for old, new in self._paths.items():
            text = text.replace(old, new)
        text = self._host.sub("HOST", text)
        text = URL_CREDENTIALS.sub("***@", text)
        text = _BEARER.sub("***", text)
        text = _OPTION.sub(_hidden, _ASSIGNMENT.sub(_hidden, text))
        return _ADDRESS.sub("ADDRESS", text)


def _hidden(match: re.Match[str]) -> str:
    name = match["name"]
    # Variables are in capitals; `tokens_per_micro_batch` is a setting and no secret.
    secret = SECRET.search(name) if name.isupper() else SECRET_ARGUMENT.search(name.lstrip("-"))
    return f"{name}{match['equals']}***" if secret else match[0]


def write(
    folder: Path,
    work: Path,
    verdicts: Sequence[StageVerdict],
    *,
    device: str,
    engine: str,
    simulated: bool,
    hosts: Sequence[str] = (),
) -> Results:
    """Everything but `machine/`; `hosts` are further names to take out."""
    clean = Redactor(work, hosts)
    kept = [verdict.model_copy(update={"result": clean(verdict.result)}) for verdict in verdicts]
    results = Results.model_validate(
        {
            "isotrain": isotrain.__version__,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "device": device,
            "engine": engine,
            "simulated": simulated,
            "seconds": sum(verdict.seconds for verdict in verdicts),
            "verdicts": kept,
        }
    )
    (folder / RESULTS).write_text(results.model_dump_json(indent=2) + "\n", encoding="utf-8")
    for verdict in verdicts:
        log = log_of(work, next(iter(part_of(verdict.stage).stages)))
        if keeps_log(verdict) and log.is_file():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            (folder / LOGS).mkdir(exist_ok=True)
            text = clean("\n".join(lines)[-LARGEST_LOG:])
            (folder / LOGS / f"{verdict.stage}.txt").write_text(text + "\n", encoding="utf-8")
    return results


def keeps_log(verdict: StageVerdict) -> bool:
    """Whether its output says more than it does: that of a stage that never began is another stage's."""
    return verdict.outcome == "failed" or (verdict.outcome == "unfinished" and verdict.seconds > 0)


def clean_machine(folder: Path) -> None:
    """Take private names out of what the doctor has saved, also out of the paths of its files."""
    clean, machine = Redactor(folder.absolute()), folder / MACHINE
    for file in [path for path in machine.rglob("*") if path.is_file()]:
        text = clean(file.read_text(encoding="utf-8", errors="replace"))
        file.unlink()
        # As it stands in `machine.json`, where a home is `~`.
        kept = machine / clean(f"/{file.relative_to(machine)}").replace("/files~", "/files/~").lstrip("/")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text, encoding="utf-8")


def is_self_test(folder: Path) -> bool:
    return (folder / RESULTS).is_file()


def read(folder: Path) -> Results:
    """A folder may come from anybody: nothing outside of it is read."""
    try:
        path = (folder / RESULTS).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ValueError(f"{RESULTS} is a link out of the folder")
        with path.open(encoding="utf-8") as file:
            return Results.model_validate_json(file.read(LARGEST_LOG))
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{folder}: not the folder of a self-test: {error}") from None


def read_log(folder: Path, stage: str) -> list[str]:
    """The kept output of a stage, if there is any. `stage` is one of our own names, not the folder's."""
    path = (folder / LOGS / f"{stage}.txt").resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(LARGEST_LOG).splitlines()
