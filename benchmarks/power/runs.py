"""Runs of tiny models, two at a time, in children of fork servers; finished ones are not run again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Two cores, and each run has one thread.
AT_ONCE = 2
START_LIMIT = 1200.0
_FAILED = {"ok": False, "late": False, "seconds": 0.0, "cpu": 0.0}


@dataclass(frozen=True)
class Job:
    """One training run, or the sampler's test of one."""

    name: str
    recipe: str
    settings: tuple[str, ...]
    server: str = "cpu"
    ranks: int = 1
    patches: tuple[tuple[str, str], ...] = ()
    """Modules with a table `PATCHES`, and names in them."""
    variables: tuple[tuple[str, str], ...] = ()
    after: str | None = None
    """A job that must be finished first."""
    cost: float = 1.0
    """In seconds on an idle core, roughly: for the estimate of the time left."""


class Server:
    """A fork server as the coordinator sees it."""

    def __init__(self, variables: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "power.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **variables},
            )
        self._waiting: dict[str, Future[dict[str, Any]]] = {}
        self._ready: Future[None] = Future()
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start it and wait for its end."""
        self._ready.result(START_LIMIT)
        replied: Future[dict[str, Any]] = Future()
        with self._lock:
            self._waiting[request["name"]] = replied
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return replied.result()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reply = json.loads(line)
            if "ready" in reply:
                self._ready.set_result(None)
                continue
            with self._lock:
                self._waiting.pop(reply["name"]).set_result(reply)
        if not self._ready.done():
            self._ready.set_exception(RuntimeError("a fork server ended while it was starting"))
        with self._lock:
            for replied in self._waiting.values():
                replied.set_result(_FAILED)


class Runs:
    def __init__(
        self, work: Path, servers: Mapping[str, Mapping[str, str]], time_limit: float, at_once: int = AT_ONCE
    ) -> None:
        """`servers`: variables by name."""
        self.work, self.time_limit = work, time_limit
        self._variables, self._servers = servers, dict[str, Server]()
        self._pool = ThreadPoolExecutor(at_once)
        self._at_once = at_once
        self._jobs: dict[str, Future[bool]] = {}
        self._lock = threading.Lock()
        self._begun, self._spent, self._left, self._done = time.monotonic(), 0.0, 0.0, 0
        (work / "runs").mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        return self.work / "runs" / name

    def submit(self, job: Job) -> Future[bool]:
        """Whether it ends well; a job of a name is run once."""
        if job.name not in self._jobs:
            if not self._finished(job):
                self._left += job.cost
            self._jobs[job.name] = self._pool.submit(self._run, job)
        return self._jobs[job.name]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for server in self._servers.values():
            server.close()

    def ended_well(self, name: str) -> bool:
        return name in self._jobs and self._jobs[name].result()

    def failure(self, name: str) -> str:
        """The last words of a run."""
        try:
            lines = self._log(name).read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1][:300] if lines else "it said nothing"

    def _log(self, name: str) -> Path:
        return self.work / "runs" / f"{name}.log"

    def _note(self, name: str) -> Path:
        return self.work / "runs" / f"{name}.json"

    def _finished(self, job: Job) -> bool | None:
        """Whether it has ended as it is described now, and whether that was well; None if it has not."""
        try:
            note = json.loads(self._note(job.name).read_text())
        except (OSError, ValueError):
            return None
        same = note["job"] == json.loads(json.dumps(asdict(job)))
        return bool(note["ok"]) if same else None

    def _run(self, job: Job) -> bool:
        before = self._finished(job)
        if before is not None:
            return before
        if job.after is not None and not self._jobs[job.after].result():
            return self._end(job, _FAILED, "what it needs failed")
        out = self.path(job.name)
        shutil.rmtree(out, ignore_errors=True)
        self._log(job.name).unlink(missing_ok=True)
        request = {
            "name": job.name,
            "task": job.recipe if job.recipe == "sampler" else "train",
            "recipe": job.recipe,
            "settings": [*job.settings, f"output={out}"],
            "ranks": job.ranks,
            "patches": job.patches,
            "variables": dict(job.variables),
            "log": str(self._log(job.name)),
            "time_limit": self.time_limit,
            "run": str(self.path(job.after)) if job.after else "",
            "out": str(self.work / "runs" / f"{job.name}.result"),
        }
        return self._end(job, self._server(job.server).run(request), "")

    def _server(self, name: str) -> Server:
        with self._lock:
            if name not in self._servers:
                log = self.work / f"server-{name}.log"
                self._servers[name] = Server(self._variables[name], log)
            return self._servers[name]

    def _end(self, job: Job, reply: Mapping[str, Any], why: str) -> bool:
        note = {"job": asdict(job), **{key: reply[key] for key in ("ok", "seconds", "cpu")}}
        self._note(job.name).write_text(json.dumps(note) + "\n")
        with self._lock:
            self._spent += job.cost
            self._left -= job.cost
            self._done += 1
            speed = (time.monotonic() - self._begun) / self._spent
            open_jobs = len(self._jobs) - sum(done.done() for done in self._jobs.values()) - 1
            ended = "ok" if reply["ok"] else f"failed {why or ('too late' if reply['late'] else '')}"
            print(
                f"  {job.name}: {ended} in {reply['seconds']:.0f} s ({reply['cpu']:.1f} of CPU); "
                f"{open_jobs} runs and about {speed * self._left / 60:.0f} min left",
                file=sys.stderr,
                flush=True,
            )
        return bool(reply["ok"])


def metrics_digest(run: Path) -> Sequence[tuple[str, Any]]:
    """All metrics of a run but those of time and memory: equal ones are the same bits."""
    kept = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        kept += [(key, value) for key, value in sorted(row.items()) if not _of_time(key)]
    return kept


def _of_time(metric: str) -> bool:
    return metric.startswith(("timing_s/", "perf/", "time")) or "memory" in metric or "seconds" in metric
