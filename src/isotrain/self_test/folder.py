"""The folder that a self-test writes, small and without anything private, to be read anywhere.

self-test.json    what ran, on what, with which verdicts and figures
logs/STAGE.txt    the end of the output of stages that failed
machine/          versions, devices and variables, as `isotrain doctor --save` writes them
"""

from __future__ import annotations

import datetime
import getpass
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

import isotrain
from isotrain.doctor.matrix import Target
from isotrain.errors import DataError
from isotrain.observe.environment import SECRET, SECRET_ARGUMENT, URL_CREDENTIALS
from isotrain.self_test.run import log_of, part_of
from isotrain.self_test.verdicts import Verdict

RESULTS, LOGS, MACHINE = "self-test.json", "logs", "machine"
LOG_LINES = 200
CONTENTS = (
    f"{RESULTS}   stages, verdicts, figures, times",
    f"{LOGS}/            the last {LOG_LINES} lines of output of stages that fail",
    f"{MACHINE}/         what `isotrain doctor` examined: devices, driver, versions, their variables",
)
LARGEST_LOG = 200_000

# Secrets by their names, in logs that print an environment or a command.
_ASSIGNMENT = re.compile(r"(?P<name>[\w.-]{2,64})(?P<equals>['\"]?\s*[=:]\s*)(?P<value>['\"]?[^\s'\",;]{6,})")
_BEARER = re.compile(r"(?i)\b(bearer|hf_|sk-|ghp_)[\w.-]{8,}|(?<=bearer )\S+")
# Addresses of private networks, and others where a port follows: versions can look like addresses.
_NUMBERS = r"\d{1,3}\.\d{1,3}"
_PRIVATE = rf"10\.\d{{1,3}}\.{_NUMBERS}|192\.168\.{_NUMBERS}|172\.(?:1[6-9]|2\d|3[01])\.{_NUMBERS}"
_ADDRESS = re.compile(rf"(?<![\d.])(?!127\.|0\.0\.0\.0)(?:{_PRIVATE}|{_NUMBERS}\.{_NUMBERS}(?=:\d))(?![.\d])")


class Results(BaseModel):
    """What `self-test.json` holds."""

    model_config = ConfigDict(strict=True, frozen=True)

    isotrain: str
    date: str
    device: Target
    engine: str
    simulated: bool
    seconds: float
    verdicts: list[Verdict]

    @property
    def passed(self) -> bool:
        return not any(verdict.outcome == "failed" for verdict in self.verdicts)


class Redactor:
    """Takes names of this machine, its user and its network out of a text."""

    def __init__(self, work: Path) -> None:
        # In this order: a directory before the one above it.
        self._paths = {str(work): "WORK", str(Path.home()): "~"}
        with suppress(KeyError, OSError):  # a container's user need not have a name
            self._paths[f"/{getpass.getuser()}/"] = "/USER/"
        hosts = {name for name in (socket.gethostname(), socket.getfqdn()) if name not in ("", "localhost")}
        self._host = re.compile(
            "|".join(rf"(?<![\w.-]){re.escape(name)}(?![\w-])" for name in hosts) or "(?!)"
        )

    def __call__(self, text: str) -> str:
        for old, new in self._paths.items():
            text = text.replace(old, new)
        text = self._host.sub("HOST", text)
        text = URL_CREDENTIALS.sub("***@", text)
        text = _BEARER.sub("***", text)
        text = _ASSIGNMENT.sub(_hidden, text)
        return _ADDRESS.sub("ADDRESS", text)


def _hidden(found: re.Match[str]) -> str:
    name = found["name"]
    # Variables are in capitals; `tokens_per_micro_batch` is a setting and no secret.
    secret = SECRET.search(name) if name.isupper() else SECRET_ARGUMENT.search(name)
    return f"{name}{found['equals']}***" if secret else found[0]


def write(
    folder: Path, work: Path, verdicts: Sequence[Verdict], *, device: str, engine: str, simulated: bool
) -> Results:
    """Everything but `machine/`, which is there already and is only cleaned."""
    clean = Redactor(work)
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
        if verdict.outcome == "failed" and log.is_file():
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            (folder / LOGS).mkdir(exist_ok=True)
            text = clean("\n".join(lines)[-LARGEST_LOG:])
            (folder / LOGS / f"{verdict.stage}.txt").write_text(text + "\n", encoding="utf-8")
    for file in (folder / MACHINE).rglob("*"):
        if file.is_file():
            file.write_text(clean(file.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")
    return results


def is_self_test(folder: Path) -> bool:
    return (folder / RESULTS).is_file()


def read(folder: Path) -> Results:
    """A folder may come from anybody: nothing outside of it is read."""
    path = (folder / RESULTS).resolve()
    try:
        if not path.is_relative_to(folder.resolve()):
            raise ValueError(f"{RESULTS} is a link out of the folder")
        with path.open(encoding="utf-8") as file:
            return Results.model_validate_json(file.read(LARGEST_LOG))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: not the folder of a self-test: {error}") from None


def read_log(folder: Path, stage: str) -> list[str]:
    """The kept output of a stage, if there is any. `stage` is one of our own names, not the folder's."""
    path = (folder / LOGS / f"{stage}.txt").resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(LARGEST_LOG).splitlines()
