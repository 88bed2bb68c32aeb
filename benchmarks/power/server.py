"""A process that has imported everything once, and forks a child for each run.

Importing torch and transformers takes as long as training a tiny model. Kernels are chosen by variables that
libraries read once: there is a server for each set of variables. Requests and replies are lines of JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MODULES = (
    *("torch", "transformers", "ray", "pyarrow.parquet", "isotrain.trainers.launch"),
    *(
        "isotrain.trainers.online.run",
        "isotrain.rollout.hf",
        "isotrain.api.child",
        "isotrain.tools.doctor.examine",
    ),
    *(
        "isotrain.tools.probes.operator_errors",
        "isotrain.trainers.online.drawn_tokens",
        "isotrain.tools.parity.levels.sampler",
    ),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3_moe", "gemma3")),
)
# Twice as many as a temperature that is 5 % off needs in the easiest case.
POSITIONS = 12_000


@dataclass
class _Running:
    """A run's processes, one for each rank."""

    name: str
    begun: float
    deadline: float
    pids: set[int]
    ok: bool = True
    cpu: float = 0.0
    """Seconds of processors, without those of what it has started."""
    all_pids: list[int] = field(default_factory=list)


def serve() -> None:
    """Until the other side closes its end."""
    for module in _MODULES:
        importlib.import_module(module)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        print(f"note: {threads} threads before a fork", file=sys.stderr, flush=True)
    running: list[_Running] = []
    _tell({"ready": True})
    pending, closed = b"", False
    while running or not closed:
        if not closed and select.select([0], [], [], 0.05 if running else None)[0]:
            said = os.read(0, 1 << 16)
            closed = not said
            *lines, pending = (pending + said).split(b"\n")
            running += [_start(json.loads(line)) for line in lines]
        elif closed:
            time.sleep(0.05)
        _reap(running)


def _reap(running: list[_Running]) -> None:
    for run in list(running):
        for pid in list(run.pids):
            ended, status, used = os.wait4(pid, os.WNOHANG)
            if ended:
                run.pids.discard(pid)
                run.cpu += used.ru_utime + used.ru_stime
                if os.waitstatus_to_exitcode(status) != 0:
                    run.ok = False
        late = time.monotonic() > run.deadline
        if run.pids and (late or not run.ok):
            # A rank that has failed leaves the others waiting for it.
            run.ok = False
            for pid in run.pids:
                _kill(pid)
        if not run.pids:
            running.remove(run)
            for pid in run.all_pids:
                _kill(pid)  # what a run has started and left, such as processes of rewards
            seconds = {"seconds": time.monotonic() - run.begun, "cpu": run.cpu}
            _tell({"name": run.name, "ok": run.ok, "late": late, **seconds})


def _kill(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _tell(content: dict[str, Any]) -> None:
    os.write(1, json.dumps(content).encode() + b"\n")


def _start(request: dict[str, Any]) -> _Running:
    ranks = request.get("ranks", 1)
    pids = [_fork(request, rank, ranks) for rank in range(ranks)]
    now = time.monotonic()
    return _Running(request["name"], now, now + request["time_limit"], set(pids), all_pids=pids)


def _fork(request: dict[str, Any], rank: int, ranks: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if ranks > 1:
            os.environ |= {
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
                **{"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
                "ISOTRAIN_STORE": request["log"] + ".store",
            }
        os.environ |= request.get("variables", {})
        _work(request)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _work(request: dict[str, Any]) -> None:
    from isotrain.children import die_with_parent

    die_with_parent()
    if request["task"] == "sampler":
        _judge_sampler(Path(request["run"]), Path(request["out"]))
        return
    from isotrain import api
    from power.inline import use_inline_workers

    use_inline_workers()
    # Nobody looks at them, and drawing takes as long as training.
    setattr(importlib.import_module("isotrain.trainers.job"), "draw_plots", lambda *_: None)  # noqa: B010
    sys.path.append(str(Path(__file__).parents[2] / "tests" / "mutations" / "site"))
    for patches, name in request["patches"]:
        table = importlib.import_module(patches).PATCHES
        for module, change in table[name].items():
            change(importlib.import_module(module))
    api.train(request["recipe"], *request["settings"], in_process=True)


def _judge_sampler(run: Path, out: Path) -> None:
    """As `isotrain parity sampler --positions` does; the run's own mistake is not in this process."""
    from isotrain.cli.parity_runs import result_of

    out.write_text(json.dumps(result_of(run, positions=POSITIONS).as_json()) + "\n")


if __name__ == "__main__":
    serve()
