"""A long online run under faults: what it recovers from, how fast, and whether it learns the same.

`isotrain train RECIPE --restarts N` trains the tiny model with two ranks, two engines and rewards in
processes of their own, while its processes are killed or stopped, its disk fills up and its process group
gets SIGTERM, at random moments. Each fault must be followed by progress within `--patience` seconds: five
steps more than there were at the fault. A run that a scheduler or a user would start again (exit code 143, or
a full disk) is started again with the same command. Some faults come while the run is still recovering.

In the end, every response of every step must have been learnt from exactly once. With staleness 0, all
metrics but times must equal those of a run without faults, bit for bit. No process, shared memory or
temporary directory may be left. `ratio` is the share of faults that were followed by progress; `met` says
whether all of that holds. Ctrl-C ends the faults early.

    python benchmarks/chaos.py [--kills 200] [--minutes M] [--staleness 0] [--engine hf] [--seed 0]
                               [--patience 300] [--stop-seconds 10] [--long-stop-seconds 90] [--keep DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import bench
from chaos_checks import TEMPORARY, abandoned, compare, left_over, responses, table
from chaos_faults import ENDING, Fault, Faults, Processes, SmallDisk

from isotrain.data.prepare.tiny import make_tiny
from isotrain.observe.metrics import read_metrics
from isotrain.trainers.preemption import PREEMPTED

VARIABLE = "ISOTRAIN_CHAOS"
DISK_BYTES = 512 << 20
RESTARTS = 5
BATCH, RESPONSES = 4, 4
# After the fault before: the next one comes at a random moment, sometimes before the run has recovered.
LONGEST_CALM, LONGEST_SURPRISE, SHARE_OF_SURPRISES = 3.0, 15.0, 0.15
STEPS_TO_RECOVER = 5
STARTING = "chaos: starting "
LOG_LINES = 60
MOST_FAILURES = 10


def recipe(tiny: Path, output: Path, engine: str, staleness: int) -> dict[str, Any]:
    """Steps of about a second; as many of them as there is time for."""
    return {
        "name": "chaos",
        "output": str(output),
        "model": {"path": str(tiny / "model"), "dtype": "float32"},
        "data": {"train": str(tiny / "prompts.jsonl"), "max_length": 64, "batch_size": BATCH},
        "algorithm": {"name": "grpo"},
        "rollout": {
            "engine": engine,
            "engines": 2,
            "n": RESPONSES,
            "max_tokens": 6,
            "record": True,
            "staleness": staleness,
            **({"kv_cache_gb": 0.25} if engine == "vllm" else {}),
        },
        "reward": {
            "answer_key": "answer",
            "function": {"path": f"{tiny / 'reward.py'}:score", "environment": [VARIABLE]},
        },
        "cluster": {"address": "local", "placement": "separate" if staleness else "colocated"},
        "device": {"type": "cpu", "ranks": 2, "determinism": "off" if staleness else "on"},
        "optimizer": {"lr": 1e-3, "schedule": "constant", "warmup_ratio": 0.0},
        "trainer": {"steps": 100_000, "save_every": 2},
        "observe": {"loggers": ["console"]},
    }


class Run:
    """One command, started again whenever a scheduler or a user would do so."""

    def __init__(self, work: Path, name: str, values: dict[str, Any], *options: str) -> None:
        self.output = Path(values["output"])
        self.log = work / f"{name}.log"
        self.starts = 0
        file = work / f"{name}.yaml"
        file.write_text(json.dumps(values))  # JSON is YAML
        self._command = [sys.executable, "-m", "isotrain.cli.main", "train", str(file), *options]
        self._mark = f"{VARIABLE}={work.name}-{name}"
        self.processes = Processes(self._mark)
        self._environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(work),
            # As many of Ray's CPUs as ranks and engines need, whatever this machine has.
            "RAY_OVERRIDE_RESOURCES": '{"CPU": 4}',
            VARIABLE: self._mark.partition("=")[2],
        }
        self.start()

    def start(self) -> None:
        self.starts += 1
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def steps(self) -> int:
        """The newest step in the metrics, which may be cut while this is read."""
        try:
            last = (self.output / "metrics.jsonl").read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2]
            return int(json.loads(last)["step"])
        except (OSError, ValueError, KeyError):
            return 0

    def tail(self, lines: int = LOG_LINES) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-lines:]

    def count(self, text: str) -> int:
        return self.log.read_text(errors="replace").count(text)

    def stop(self, timeout: float) -> int | None:
        """As a scheduler does it; returns the exit code, None if it did not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Whatever is left of it."""
        self.processes.kill_all()
        self.process.wait()


class Chaos:
    """The run under faults, and what happened to it."""

    def __init__(self, run: Run, faults: Faults, patience: float) -> None:
        self.run, self.faults, self.patience = run, faults, patience
        self.made: list[Fault] = []
        self.hangs: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        """Ends that no scheduler and no supervisor would follow with a start."""
        self.started_again: Counter[str] = Counter()

    def wait_for_first_steps(self) -> None:
        deadline = time.monotonic() + self.patience
        while self.run.steps() < STEPS_TO_RECOVER:
            if self.run.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("\n".join(["the run did not start:", *self.run.tail()]))
            time.sleep(0.1)

    def strike(self) -> None:
        """One fault at a random moment, and what follows it."""
        draw = self.faults.draw
        surprise = bool(self.made) and draw.random() < SHARE_OF_SURPRISES
        time.sleep(draw.uniform(0.0, LONGEST_CALM))
        fault = self._make(alone=True)
        if surprise:
            self._watch(fault, until=time.monotonic() + draw.uniform(0.0, LONGEST_SURPRISE))
            self._undo(fault)
            if fault.recovery is None:
                fault = self._make(alone=False)
        self._watch(fault)

    def _make(self, alone: bool) -> Fault:
        while True:
            self._start_again_if_ended("between faults")
            supervisor, starts = self.run.process.pid, self.run.count(STARTING)
            kind = self.faults.next_kind(supervisor)
            fault = kind and self.faults.make(kind, supervisor, self.run.steps())
            if fault:
                fault.alone, fault.starts = alone, starts
                self.made.append(fault)
                return fault
            time.sleep(0.1)

    def _watch(self, fault: Fault, until: float | None = None) -> None:
        """Until the run has recovered, or hangs; or for some time only."""
        while fault.recovery is None and (until is None or time.monotonic() < until):
            now = time.monotonic()
            if fault.undo_at is not None and now > fault.undo_at:
                self._undo(fault)
            self._start_again_if_ended(fault.kind, fault)
            if self._has_recovered(fault):
                fault.recovery = time.monotonic() - fault.time
                self._undo(fault)
            elif now > fault.time + self.patience:
                self._undo(fault)
                self._note(self.hangs, fault.kind, fault.victim, processes=self.run.processes.describe())
                self.run.end()
                self.run.start()
                self.started_again["hang"] += 1
                return
            time.sleep(0.05)
        self._tell(fault)

    def _has_recovered(self, fault: Fault) -> bool:
        """The last steps before a death is noticed do not count."""
        started = fault.kind not in ENDING or self.run.count(STARTING) > fault.starts
        return started and self.run.steps() >= fault.step + STEPS_TO_RECOVER

    def _undo(self, fault: Fault) -> None:
        fault.undo()
        fault.undo_at = None

    def _start_again_if_ended(self, kind: str, fault: Fault | None = None) -> None:
        code = self.run.process.poll()
        if code is None:
            return
        recent = {one.kind for one in self.made[-2:]}
        # Before it listens to signals, one just ends it: to a shell, that is 143 too.
        if code in (PREEMPTED, -signal.SIGTERM) and "preemption" in recent:
            self.started_again["preemption"] += 1
        elif code == 1 and "No space left" in "\n".join(self.run.tail(20)) and "full disk" in recent:
            self.started_again["full disk"] += 1
            if fault is not None:
                self._undo(fault)
        else:
            self._note(self.failures, kind, f"exit code {code}")
            if len(self.failures) > MOST_FAILURES:
                raise SystemExit(json.dumps(self.failures, indent=1))
        self.run.start()

    def _note(self, notes: list[dict[str, Any]], kind: str, what: str, **evidence: object) -> None:
        print(f"{kind}: {what}\n" + "\n".join(self.run.tail()), file=sys.stderr, flush=True)
        for line in evidence.get("processes", []):  # type: ignore[attr-defined]
            print(line, file=sys.stderr, flush=True)
        notes.append({"kind": kind, "what": what, "fault": len(self.made), "log": self.run.tail(20)})

    def _tell(self, fault: Fault) -> None:
        after = "not yet" if fault.recovery is None else f"{fault.recovery:.1f} s"
        what = f"{len(self.made)} {fault.kind} ({fault.victim}) at step {fault.step}: {after}"
        print(what, file=sys.stderr, flush=True)

    def counts(self) -> dict[str, Any]:
        kinds = sorted({fault.kind for fault in self.made})
        return {
            "faults": len(self.made),
            "while_recovering": sum(not fault.alone for fault in self.made),
            "steps": self.run.steps(),
            "restarts": self.run.count("; restart "),
            "replaced_workers": self.run.count("a new worker replaces it"),
            "started_again": dict(self.started_again),
            "hangs": self.hangs,
            "failures": self.failures,
            "kinds": {kind: self._of_kind(kind) for kind in kinds},
        }

    def _of_kind(self, kind: str) -> dict[str, Any]:
        made = [fault for fault in self.made if fault.kind == kind]
        seconds = [fault.recovery for fault in made if fault.recovery is not None]
        return {"faults": len(made), "recovery_s": bench.spread(seconds) if seconds else None}

    @property
    def share_recovered(self) -> float:
        return 1.0 - len(self.hangs + self.failures) / max(len(self.made), 1)


def calm_run(work: Path, values: dict[str, Any], steps: int, patience: float) -> Path:
    """The same recipe without faults, for as many steps."""
    run = Run(work, "calm", {**values, "output": str(work / "calm")})
    seen, changed = 0, time.monotonic()
    try:
        while (now := run.steps()) < steps:
            seen, changed = (now, time.monotonic()) if now > seen else (seen, changed)
            if run.process.poll() is not None or time.monotonic() > changed + patience:
                raise SystemExit("\n".join(["the run without faults failed:", *run.tail()]))
            time.sleep(0.2)
        run.stop(patience)
    finally:
        run.end()
    return run.output


def finish(chaos: Chaos, work: Path, values: dict[str, Any], options: argparse.Namespace) -> None:
    """End the run, check everything that it leaves, and report."""
    run = chaos.run
    code = run.stop(options.patience)
    if code != PREEMPTED:
        chaos.failures.append({"kind": "end", "what": f"exit code {code}", "log": run.tail(20)})
    left = left_over(run.processes, work, options.shared_before)
    run.end()
    steps = len(read_metrics(run.output / "metrics.jsonl"))
    learnt = responses(run.output, steps, BATCH, RESPONSES, options.staleness)
    same: dict[str, Any] = {}
    if options.staleness == 0:
        same = compare(run.output, calm_run(work, values, steps, options.patience), steps)
    met = bool(chaos.made) and chaos.share_recovered == 1.0  # a run without faults shows nothing
    met = met and not any(left.values()) and learnt["lost"] + learnt["doubled"] == 0
    figures = {
        **chaos.counts(),
        "responses": learnt,
        "metrics": same,
        "left": left,
        "engine": options.engine,
        "staleness": options.staleness,
        "seed": options.seed,
        "patience_s": options.patience,
        "stop_seconds": [options.stop_seconds, options.long_stop_seconds],
        "disk": chaos.faults.disk.complaint or "filled",
    }
    met = met and same.get("different", 0) == 0 and learnt["too_old"] == 0
    bench.report("chaos", chaos.share_recovered, goal=1.0, met=met, **figures)
    print(table(figures), file=sys.stderr, flush=True)


def main() -> None:
    parser = bench.Options(__doc__, kills=3, stop_seconds=5.0, long_stop_seconds=15.0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no more faults after that time")
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=300.0)
    parser.add_argument("--stop-seconds", type=float, default=10.0, help="stopped workers and full disks")
    parser.add_argument("--long-stop-seconds", type=float, default=90.0, help="every fourth stopped worker")
    parser.add_argument("--keep", type=Path, help="a directory for logs and the run, after the end")
    options = parser.read()
    # Whoever ends this script, also with a time limit, ends the run and its mount too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(PREEMPTED))
    # Short: Ray's sockets are below it.
    work = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    options.shared_before = abandoned()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        disk = SmallDisk(work / "disk", DISK_BYTES)
        stack.callback(disk.close)
        if options.keep:
            not_sockets = shutil.ignore_patterns(*TEMPORARY)
            stack.callback(shutil.copytree, work, options.keep, ignore=not_sockets, dirs_exist_ok=True)
        if disk.complaint:
            print(f"no faults of full disks: a tmpfs cannot be mounted: {disk.complaint}", file=sys.stderr)
        make_tiny(work / "tiny")
        values = recipe(work / "tiny", disk.path / "run", options.engine, options.staleness)
        run = Run(work, "wild", values, "--restarts", str(RESTARTS))
        stack.callback(run.end)
        seconds = (options.stop_seconds, options.long_stop_seconds)
        faults = Faults(run.processes, disk, *seconds, random.Random(options.seed))
        chaos = Chaos(run, faults, options.patience)
        chaos.wait_for_first_steps()
        deadline = time.monotonic() + 60 * options.minutes
        with suppress(KeyboardInterrupt):  # the faults so far count
            while len(chaos.made) < options.kills and time.monotonic() < deadline:
                chaos.strike()
                if len(chaos.made) % 10 == 0:
                    bench.report("chaos", chaos.share_recovered, goal=1.0, met=None, **chaos.counts())
        finish(chaos, work, values, options)


if __name__ == "__main__":
    main()
