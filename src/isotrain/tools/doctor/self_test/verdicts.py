"""The verdict on a stage, and the file through which a part's process reports it."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from isotrain.children import die_with_parent

Outcome = Literal["passed", "failed", "skipped", "unfinished"]
"""`unfinished`: time was over before there was an answer, which is neither a pass nor a failure."""
Engine = Literal["vllm", "hf"]

PROGRESS = "--- "


class StageVerdict(BaseModel):
    # A metric that is no number is what a broken device gives: it must survive the file.
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", ser_json_inf_nan="constants")

    stage: str
    outcome: Outcome
    result: str
    """One sentence for people."""
    metrics: dict[str, float] = Field(default_factory=dict)
    seconds: float = 0.0


class SelfTestSetting(BaseModel):
    """Settings that every part gets."""

    model_config = ConfigDict(strict=True, frozen=True)

    device: str
    devices: int = 0
    """How many can be used; 0 until the first part has counted them."""
    engine: Engine = "hf"
    work: str
    """A directory for files that are not kept."""
    verdicts: str = ""
    """The file to report to; each part has its own."""
    cluster: str | None = None
    """The address of a Ray cluster of several machines."""
    started: float = 0.0
    """When the self-test began, in seconds since the epoch."""
    free: tuple[float, ...] = ()
    """Free bytes on each device before anything ran."""
    killed: bool = False
    """Whether a part had to be killed, and could not clean up."""
    mode: str = ""
    """Which of several programs in one module to run."""

    @property
    def directory(self) -> Path:
        return Path(self.work)

    @property
    def dtype(self) -> str:
        """Type of an engine's weights: one that devices have kernels for; on the host, an exact one."""
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def tiny(self) -> Path:
        """The small model and its data, which the first part makes."""
        return self.directory / "tiny"


class StageFailed(Exception):
    """A check that did not hold, in one sentence."""


class StageSkipped(Exception):
    """Why a stage says nothing on this machine."""


class Stage:
    """Result and metrics of a stage so far."""

    def __init__(self) -> None:
        self.result = ""
        self.metrics: dict[str, float] = {}

    def at_most(self, what: str, value: float, allowed: float) -> None:
        """Keep a metric, and fail where it is larger than allowed, or is no number."""
        self.metrics[what] = value
        if not value <= allowed:
            raise StageFailed(f"{what} is {value:.3g}; at most {allowed:.3g} is allowed")

    def at_least(self, what: str, value: float, least: float) -> None:
        self.metrics[what] = value
        if not value >= least:
            raise StageFailed(f"{what} is {value:.3g}; at least {least:.3g} was expected")


class Reporter:
    """Writes the verdicts of this process. The first failure ends it, unless its stages are independent."""

    def __init__(self, path: str, independent: bool = False) -> None:
        self._path, self._independent = Path(path), independent

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        tell_progress(name)
        stage, started = Stage(), time.monotonic()

        def write(outcome: Outcome, result: str) -> None:
            seconds = time.monotonic() - started
            verdict = StageVerdict(
                stage=name, outcome=outcome, result=result, metrics=stage.metrics, seconds=seconds
            )
            with self._path.open("a", encoding="utf-8") as file:
                file.write(verdict.model_dump_json() + "\n")

        try:
            yield stage
        except StageSkipped as reason:
            write("skipped", str(reason))
        except Exception as error:
            write("failed", explain(error))
            if not self._independent:
                raise SystemExit(1) from None
        else:
            write("passed", stage.result)


def tell_progress(what: str) -> None:
    """A line of the log that names what a process that hangs was doing."""
    print(f"{PROGRESS}{what}", flush=True)


def explain(error: Exception) -> str:
    """One sentence for the verdict; where an error is not a check's own, the log gets where it was."""
    if isinstance(error, StageFailed):
        return str(error)
    traceback.print_exception(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:500] if lines else 'no message'}"


def read_verdicts(path: Path) -> list[StageVerdict]:
    """Verdicts of whole lines: the last line may still be being written."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [StageVerdict.model_validate_json(line) for line in lines]


def own_setting() -> SelfTestSetting:
    """Setting of a part's process, its only argument. The process ends with the one that started it."""
    die_with_parent()
    return SelfTestSetting.model_validate_json(sys.argv[1])


def argument(setting: SelfTestSetting, **changes: Any) -> str:
    return setting.model_copy(update=changes).model_dump_json()
