"""Runs the parts of the self-test one after the other, each in processes of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isotrain.self_test.stages import DEVICES, PARTS, TOTAL_SECONDS, Part
from isotrain.self_test.verdicts import PROGRESS, Setting, Verdict, argument, read_verdicts

# In the environment of everything that the self-test starts, so that what it leaves can be found.
MARK = "ISOTRAIN_SELF_TEST"
_POLL_SECONDS = 0.1
# For a part that has given its verdicts to clean up.
_GRACE_SECONDS = 20.0


@dataclass
class SelfTest:
    setting: Setting
    begins: Callable[[str], None] = lambda stage: None
    """Called with the name of each stage that starts."""
    parts: Sequence[Part] = PARTS
    total_seconds: float = TOTAL_SECONDS
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def run(self) -> Iterator[Verdict]:
        """Verdicts on all stages, each as soon as it is known."""
        deadline = time.monotonic() + self.total_seconds
        setting = self.setting.model_copy(update={"started": time.time()})
        outcomes: dict[str, str] = {}
        try:
            for part in self.parts:
                for verdict in self._verdicts(part, setting, outcomes, deadline):
                    outcomes[verdict.stage] = verdict.outcome
                    if part == DEVICES and verdict.outcome == "passed":
                        setting = _counted(setting, verdict)
                    yield verdict
        finally:
            self._kill()

    def _verdicts(
        self, part: Part, setting: Setting, outcomes: dict[str, str], deadline: float
    ) -> Iterator[Verdict]:
        reason = part.why_not(setting)
        if part.after and outcomes.get(part.after) != "passed":
            reason = f"{part.after} did not pass"
        if time.monotonic() > deadline:
            reason = f"the self-test's {self.total_seconds / 60:.0f} minutes are over"
        if reason:
            for stage in part.stages:
                yield Verdict(stage=stage, outcome="skipped", result=reason)
            return
        yield from self._run(part, setting, deadline)

    def _run(self, part: Part, setting: Setting, deadline: float) -> Iterator[Verdict]:
        log = log_of(setting.directory, next(iter(part.stages)))
        log.parent.mkdir(parents=True, exist_ok=True)
        Path(setting.verdicts).unlink(missing_ok=True)
        told = argument(setting, mode=part.mode)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", f"isotrain.self_test.parts.{part.module}", told],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self.mark},
                start_new_session=True,
            )
            try:
                yield from self._watch(part, process, Path(setting.verdicts), log, deadline)
            finally:
                _end(process)

    def _watch(
        self, part: Part, process: subprocess.Popen[bytes], reports: Path, log: Path, deadline: float
    ) -> Iterator[Verdict]:
        """The verdicts that the process reports, and those that follow from its end."""
        stages = list(part.stages)
        for number, stage in enumerate(stages):
            self.begins(stage)
            started = time.monotonic()
            limit = min(started + part.timeout, deadline)
            verdict = None
            while verdict is None:
                ended = process.poll() is not None  # asked first: it reports before it ends
                reported = read_verdicts(reports)
                now = time.monotonic()
                if len(reported) > number:
                    verdict = reported[number]
                elif ended or now > limit:
                    how = _how_it_ended(process.returncode, now - started, log)
                    verdict = Verdict(stage=stage, outcome="failed", result=how, seconds=now - started)
                    if not ended:
                        self._kill()
                else:
                    time.sleep(_POLL_SECONDS)
            yield verdict
            if verdict.outcome == "failed":
                for missed in stages[number + 1 :]:
                    yield Verdict(stage=missed, outcome="skipped", result=f"{stage} did not pass")
                return

    def _kill(self) -> None:
        """Everything that the self-test has started."""
        for process in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def log_of(work: Path, stage: str) -> Path:
    return work / "logs" / f"{stage}.txt"


def part_of(stage: str) -> Part:
    return next(part for part in PARTS if stage in part.stages)


def _counted(setting: Setting, verdict: Verdict) -> Setting:
    free = [value for name, value in sorted(verdict.figures.items()) if name.startswith("free bytes")]
    return setting.model_copy(update={"devices": int(verdict.figures["devices"]), "free": tuple(free)})


def _how_it_ended(code: int | None, seconds: float, log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if code is None:
        told = [line.removeprefix(PROGRESS) for line in lines if line.startswith(PROGRESS)]
        return f"no verdict within {seconds:.0f} s" + (f", during: {told[-1][:300]}" if told else "")
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return how + (f"; the last output: {lines[-1][:300]}" if lines else "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The part and all that is in its session; what left the session is for the last stage to find."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def marked(mark: str) -> list[int]:
    """Processes that carry the mark, but not this one and those above it."""
    above = {os.getpid(), os.getppid()}
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) in above:
            continue
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
    return sorted(found)
