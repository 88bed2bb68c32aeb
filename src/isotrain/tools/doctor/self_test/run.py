"""Runs the parts of the self-test one after the other, each in processes of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isotrain.children import module_command
from isotrain.process.child import kill_group, marked_processes
from isotrain.tools.doctor.self_test.stages import (
    BUDGET_MINUTES,
    DEVICES,
    LAST_SECONDS,
    PARTS,
    SelfTestPart,
)
from isotrain.tools.doctor.self_test.verdicts import (
    PROGRESS,
    Outcome,
    SelfTestSetting,
    StageVerdict,
    argument,
    read_verdicts,
)

# In the environment of everything that the self-test starts, so that what it leaves can be found.
MARK = "ISOTRAIN_SELF_TEST"
_POLL_SECONDS = 0.1
# For a part that has given its verdicts to clean up.
_GRACE_SECONDS = 20.0
_KILL_ROUNDS = 20
SKIPPED: Outcome = "skipped"
UNFINISHED: Outcome = "unfinished"

# Of a job launcher: parts would take themselves for ranks of that job.
_OF_LAUNCHERS = re.compile(
    "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|ROLE_.*|MASTER_ADDR|MASTER_PORT|RANK_TABLE_FILE"
    "|ISOTRAIN_STORE|TORCHELASTIC_.*"
)


@dataclass
class SelfTest:
    setting: SelfTestSetting
    begins: Callable[[str], None] = lambda stage: None
    """Called with the name of each stage that starts."""
    parts: Sequence[SelfTestPart] = PARTS
    total_seconds: float = 60.0 * BUDGET_MINUTES
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    killed: bool = False

    @property
    def _over(self) -> str:
        return f"the {self.total_seconds / 60:.3g} minutes of --budget were over"

    def run(self) -> Iterator[StageVerdict]:
        """Verdicts on all stages, each as soon as it is known."""
        deadline = time.monotonic() + self.total_seconds - LAST_SECONDS
        setting = self.setting.model_copy(update={"started": time.time()})
        outcomes: dict[str, str] = {}
        try:
            for part in self.parts:
                if part.mode == "leftovers":
                    deadline = time.monotonic() + LAST_SECONDS
                for verdict in self._verdicts(part, setting, outcomes, deadline):
                    outcomes[verdict.stage] = verdict.outcome
                    if part == DEVICES and verdict.outcome == "passed":
                        setting = _counted(setting, verdict)
                    yield verdict
        finally:
            self._kill()

    def _verdicts(
        self, part: SelfTestPart, setting: SelfTestSetting, outcomes: dict[str, str], deadline: float
    ) -> Iterator[StageVerdict]:
        reason, outcome = part.why_not(setting), SKIPPED
        if not reason and part.after and outcomes.get(part.after) != "passed":
            reason = f"{part.after} did not pass"
            if outcomes.get(part.after) == "unfinished":
                reason, outcome = f"{part.after} did not end", UNFINISHED
        if not reason and time.monotonic() > deadline:
            reason, outcome = f"{self._over} before it began", UNFINISHED
        if reason:
            for stage in part.stages:
                yield StageVerdict(stage=stage, outcome=outcome, result=reason)
        else:
            yield from self._run(part, setting, deadline)

    def _run(self, part: SelfTestPart, setting: SelfTestSetting, deadline: float) -> Iterator[StageVerdict]:
        log = log_of(setting.directory, next(iter(part.stages)))
        log.parent.mkdir(parents=True, exist_ok=True)
        # A file of its own: a process that cannot be killed may still write to that of another part.
        verdicts = log.with_suffix(".jsonl")
        passed = argument(setting, mode=part.mode, verdicts=str(verdicts), killed=self.killed)
        with log.open("wb") as output:
            process = subprocess.Popen(
                module_command(f"isotrain.tools.doctor.self_test.parts.{part.module}", passed),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=setting.work,
                env=environment(self.mark, setting.directory),
                start_new_session=True,
            )
            try:
                yield from self._watch(part, process, verdicts, log, deadline)
            finally:
                _end(process)

    def _watch(
        self, part: SelfTestPart, process: subprocess.Popen[bytes], reports: Path, log: Path, deadline: float
    ) -> Iterator[StageVerdict]:
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
                    outcome: Outcome = "failed"
                    # A stage that ended by itself, or took longer than it ever may, has failed all the same.
                    if not ended and now <= started + part.timeout:
                        how, outcome = f"{self._over}: {how}", "unfinished"
                    verdict = StageVerdict(stage=stage, outcome=outcome, result=how, seconds=now - started)
                    self.killed = True
                    self._kill()
                else:
                    time.sleep(_POLL_SECONDS)
            yield verdict
            if verdict.outcome == "unfinished":
                for missed in stages[number + 1 :]:
                    yield StageVerdict(stage=missed, outcome=UNFINISHED, result=f"{stage} did not end")
                return
            if verdict.outcome == "failed" and not (part.independent and len(reported) > number):
                for missed in stages[number + 1 :]:
                    yield StageVerdict(stage=missed, outcome=SKIPPED, result=f"{stage} did not pass")
                return

    def _kill(self) -> None:
        """Everything that the self-test has started, also what is started meanwhile."""
        for _ in range(_KILL_ROUNDS):
            left = marked(self.mark)
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if not left:
                return
            time.sleep(_POLL_SECONDS)


def environment(mark: str, work: Path) -> dict[str, str]:
    """Variables of a part: the user's, but for those of other jobs; caches are new, and go with the rest."""
    variables = {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(name)}
    if "PYTHONPATH" in variables:  # parts run in another directory
        variables["PYTHONPATH"] = os.pathsep.join(
            os.path.abspath(path) for path in variables["PYTHONPATH"].split(os.pathsep) if path
        )
    caches = ("ISOTRAIN_CACHE", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    # Programs that change their title would otherwise write it over the environment, and the mark.
    return {
        **variables,
        **{name: str(work / "cache" / name.lower()) for name in caches},
        MARK: mark,
        "SPT_NOENV": "1",
    }


def log_of(work: Path, stage: str) -> Path:
    return work / "logs" / f"{stage}.txt"


def part_of(stage: str) -> SelfTestPart:
    return next(part for part in PARTS if stage in part.stages)


def _counted(setting: SelfTestSetting, verdict: StageVerdict) -> SelfTestSetting:
    free = [value for name, value in sorted(verdict.metrics.items()) if name.startswith("free bytes")]
    return setting.model_copy(update={"devices": int(verdict.metrics["devices"]), "free": tuple(free)})


def _how_it_ended(code: int | None, seconds: float, log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if code is None:
        progress = [line.removeprefix(PROGRESS) for line in lines if line.startswith(PROGRESS)]
        return f"no verdict within {seconds:.0f} s" + (f", during: {progress[-1][:300]}" if progress else "")
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return how + (f"; the last output: {lines[-1][:300]}" if lines else "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The part and all that is in its session; what left the session is for the last stage to find."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)
    kill_group(process.pid)
    # After a driver's hang a process may not even be killed: the last stage names it.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)


def marked(mark: str) -> list[int]:
    """Processes that carry the mark, but not this one and those above it."""
    return sorted(marked_processes(f"{MARK}={mark}") - {os.getpid(), os.getppid()})
