"""Greedy programs in bubblewrap: each ends in time, with all that it started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hostile import BOUND, LIMITS, run, running, wait_until

from isotrain.errors import SandboxError
from isotrain.process.bubblewrap import Bubblewrap
from isotrain.process.supervise import MIB
from sandboxes import bubblewrap


def test_stops_a_fork_bomb(sandbox: Bubblewrap) -> None:
    # At most 256 processes that then wait: without a limit the test fails, and the machine goes on.
    program = (
        "import os, time\n"
        "for _ in range(8):\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
        "os.write(1, b'x')\n"
        "time.sleep(30)\n"
    )
    outcome = run(sandbox, program)
    assert outcome.ended == "time" and set(outcome.stdout) == {"x"}
    assert LIMITS.processes / 2 < len(outcome.stdout) <= LIMITS.processes
    assert run(sandbox, "print(1)").succeeded


def test_the_limit_of_processes_is_each_programs_own(sandbox: Bubblewrap) -> None:
    program = (
        "import os, time\nchildren = 0\n"
        "try:\n"
        f"    while children < {4 * LIMITS.processes}:\n"
        "        if os.fork() == 0:\n            time.sleep(10)\n            os._exit(0)\n"
        "        children += 1\n"
        "except OSError:\n    print(children, flush=True)\n"
        "time.sleep(1)\n"
    )
    with ThreadPoolExecutor(3) as threads:
        outcomes = list(threads.map(lambda _: run(sandbox, program), range(3)))
    counts = [int(outcome.stdout) for outcome in outcomes]
    assert all(LIMITS.processes - 4 <= count < LIMITS.processes for count in counts), counts


def test_stops_a_gigabyte_of_output(sandbox: Bubblewrap) -> None:
    for stream in ("stdout", "stderr"):
        program = f"import sys\nfor _ in range(1024):\n    sys.{stream}.write('x' * 2**20)"
        outcome = run(sandbox, program)
        assert (outcome.ended, outcome.exit_code) == ("output", None)
        assert len(getattr(outcome, stream)) == LIMITS.output
    quick = run(sandbox, f"import os\nos.write(1, b'x' * {LIMITS.output})")
    assert quick.ended == "exit" and len(quick.stdout) == LIMITS.output


def test_limits_memory_of_one_process(sandbox: Bubblewrap) -> None:
    outcome = run(sandbox, "kept = []\nfor _ in range(64):\n    kept.append(b'x' * 2**24)")
    assert (outcome.ended, outcome.exit_code) == ("memory", 1)
    huge = run(sandbox, "bytearray(2**40)")
    assert huge.ended == "memory"


def test_limits_memory_of_many_processes_together(sandbox: Bubblewrap) -> None:
    program = (
        "import os, time\nfor _ in range(3):\n    os.fork()\nkept = b'x' * (200 * 2**20)\ntime.sleep(60)\n"
    )
    outcome = run(sandbox, program)
    assert (outcome.ended, outcome.exit_code) == ("memory", None)


# Those of a container that Docker starts: root, without CAP_SYS_PTRACE and CAP_PERFMON.
CONTAINER = (
    "chown dac_override fowner fsetid kill setgid setuid setpcap net_bind_service net_raw sys_chroot mknod"
)


def test_memory_is_limited_for_root_without_the_right_to_trace(sandbox: Bubblewrap) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root has capabilities to drop, with setpriv")
    program = "import os, time\nfor _ in range(2):\n    os.fork()\nkept = b'x' * (96 << 20)\ntime.sleep(60)\n"
    code = (
        "from isotrain.process.sandbox import Limits\nfrom isotrain.process.bubblewrap import Bubblewrap\n"
        f"sandbox = Bubblewrap(Limits(seconds=20.0, memory={256 * MIB}))\nsandbox.start()\n"
        f"print(sandbox.run({program!r}).ended, sandbox.run('print(1)').ended)"
    )
    kept = ",".join(["-all", *(f"+{name}" for name in CONTAINER.split())])
    command = ["setpriv", f"--bounding-set={kept}", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["memory", "exit"], done.stderr


def test_a_sandbox_that_cannot_measure_memory_does_not_start(
    sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isotrain.process.bubblewrap._memory_is_measured", False)
    monkeypatch.setattr("isotrain.process.bubblewrap._FIRST_RUN", 2.0)
    monkeypatch.setattr("isotrain.process.supervise._memory_of", lambda pid: 0)
    with pytest.raises(
        SandboxError, match=r"cannot be limited: 32 MiB were exceeded.*mount /proc without hidepid"
    ):
        Bubblewrap(LIMITS).start()


def test_stops_a_program_that_sleeps_or_computes_for_ever(sandbox: Bubblewrap) -> None:
    for program in ("import time\ntime.sleep(1000)", "while True: pass", "import signal\nsignal.pause()"):
        outcome = sandbox.run(f"print('begun', flush=True)\n{program}", seconds=1.0)
        assert (outcome.ended, outcome.stdout) == ("time", "begun\n")
        assert 1.0 <= outcome.seconds < BOUND


def test_signals_do_not_keep_it_alive(sandbox: Bubblewrap) -> None:
    program = (
        "import os, signal, time\n"
        "for number in set(range(1, 32)) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "for pid in (1, os.getppid()):\n"
        "    try:\n        os.kill(pid, signal.SIGKILL)\n    except OSError:\n        pass\n"
        "print('still here', flush=True)\ntime.sleep(1000)\n"
    )
    outcome = sandbox.run(program, seconds=1.5)
    assert (outcome.ended, outcome.stdout) == ("time", "still here\n")


def test_daemons_do_not_survive(sandbox: Bubblewrap) -> None:
    mark = f"survivor-{os.getpid()}-{time.monotonic_ns()}"
    program = (
        "import os, subprocess, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for fd in range(3):\n            os.close(fd)\n"
        "        sleep = 'import time; time.sleep(600)'\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', sleep, {mark!r}])\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "time.sleep({pause})\n"
        "print('done')\n"
    )
    assert run(sandbox, program.replace("{pause}", "0.3")).stdout == "done\n"
    assert not running(mark)
    assert sandbox.run(program.replace("{pause}", "600"), seconds=1.0).ended == "time"
    assert not running(mark)


def test_ten_thousand_open_files(sandbox: Bubblewrap) -> None:
    program = (
        "files = []\n"
        "try:\n    for _ in range(10_000):\n        files.append(open('/dev/null'))\n"
        "except OSError as error:\n    print(len(files), error.strerror)\n"
    )
    count, _, reason = run(sandbox, program).stdout.partition(" ")
    assert 0 < int(count) < LIMITS.open_files and reason == "Too many open files\n"


def test_a_full_disk_is_the_sandboxs_own(sandbox: Bubblewrap) -> None:
    program = (
        "import os\n"
        "written = 0\n"
        "for directory in ('/tmp', '/dev/shm', '/', '/dev'):\n"
        "    try:\n"
        "        for number in range(100):\n"
        "            with open(f'{directory}/{number}', 'wb', buffering=0) as file:\n"
        "                written += file.write(bytes(2**20))\n"
        "    except OSError as error:\n        print(error.strerror)\n"
        "print(written)\n"
    )
    *reasons, written = run(sandbox, program).stdout.splitlines()
    assert reasons[:2] == ["No space left on device"] * 2 and reasons[2:] == ["Read-only file system"] * 2
    assert LIMITS.disk / 2 < int(written) <= LIMITS.disk + 2 * MIB
    assert run(sandbox, "open('/tmp/x', 'wb').write(bytes(2**20))").succeeded  # a new one for each program


def test_a_killed_parent_takes_its_programs_along(sandbox: Bubblewrap, tmp_path: Path) -> None:
    mark = f"orphan-{os.getpid()}-{time.monotonic_ns()}"
    script = tmp_path / "parent.py"
    script.write_text(
        "from isotrain.process.sandbox import Limits\nfrom isotrain.process.bubblewrap import Bubblewrap\n"
        "sandbox = Bubblewrap(Limits(seconds=600))\nsandbox.start()\nprint('ready', flush=True)\n"
        'sandbox.run("""import os, sys\n'
        "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', '" + mark + "'])"
        '""")\n'
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        wait_until(lambda: bool(running(mark)))
        parent.kill()
    wait_until(lambda: not running(mark))


def test_close_ends_what_runs_and_refuses_the_rest() -> None:
    mark = f"closed-{os.getpid()}-{time.monotonic_ns()}"
    program = (
        f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'while True: pass', {mark!r}])"
    )
    limits = replace(LIMITS, seconds=600.0)
    with bubblewrap(limits) as sandbox, ThreadPoolExecutor(1) as threads:
        outcome = threads.submit(sandbox.run, program)
        wait_until(lambda: bool(running(mark)))
        sandbox.close()
        with pytest.raises(SandboxError, match="closed while a program ran in it"):
            outcome.result(timeout=BOUND)
        assert not running(mark)
        with pytest.raises(SandboxError, match="closed"):
            sandbox.run("print(1)")
