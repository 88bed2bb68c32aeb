"""Hostile programs in bubblewrap: none reaches the host, and each ends in time with all that it started."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isotrain.errors import SandboxError
from isotrain.sandbox.base import MIB, Limits, Outcome
from isotrain.sandbox.bubblewrap import NOBODY, Bubblewrap
from sandboxes import bubblewrap

LIMITS = Limits(seconds=4.0, memory=512 * MIB, output=MIB, disk=8 * MIB)
# Of the wall clock, on a machine that does other things as well: the limit, the end, and the start.
BOUND = LIMITS.seconds + 15
SECRET = "correct horse battery staple"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Bubblewrap]:
    os.environ["SANDBOX_TEST_KEY"] = SECRET
    with bubblewrap(LIMITS) as one:
        yield one
    del os.environ["SANDBOX_TEST_KEY"]


def run(sandbox: Bubblewrap, program: str, stdin: str = "") -> Outcome:
    begun = time.monotonic()
    outcome = sandbox.run(program, stdin)
    assert time.monotonic() - begun < BOUND
    assert SECRET not in outcome.stdout + outcome.stderr
    return outcome


def refused(sandbox: Bubblewrap, statement: str) -> str:
    """The error that a statement raises in the sandbox."""
    program = (
        "import ctypes, os, socket, subprocess, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def check(result):\n"
        "    if result < 0:\n"
        "        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
        f"try:\n    {statement}\nexcept OSError as error:\n    print(type(error).__name__)\n"
        "else:\n    print('not refused')\n"
    )
    outcome = run(sandbox, program)
    assert outcome.succeeded, outcome.stderr
    return outcome.stdout.strip()


def test_a_program_with_its_input_and_its_end(sandbox: Bubblewrap) -> None:
    outcome = run(
        sandbox, "import sys\nprint(input().upper())\nprint('é', file=sys.stderr)\nsys.exit(3)", "höhe\n"
    )
    assert (outcome.ended, outcome.exit_code) == ("exit", 3)
    assert (outcome.stdout, outcome.stderr) == ("HÖHE\n", "é\n")
    assert not outcome.succeeded and outcome.seconds > 0
    assert run(sandbox, "print(1)").succeeded
    assert run(sandbox, "import os; os.kill(os.getpid(), 15)").exit_code == 128 + signal.SIGTERM
    assert run(sandbox, "print(").exit_code == 1


def test_ordinary_programs_may_use_threads_and_processes(sandbox: Bubblewrap) -> None:
    program = (
        "import asyncio, multiprocessing, subprocess, tempfile, threading\n"
        "thread = threading.Thread(target=print, args=('thread',), kwargs={'flush': True})\n"
        "thread.start(), thread.join()\n"
        "print(asyncio.run(asyncio.sleep(0, 'loop')))\n"
        "print(subprocess.run(['echo', 'process'], capture_output=True, text=True).stdout.strip())\n"
        "with multiprocessing.Pool(2) as pool:\n    print(pool.map(abs, [-1, -2]))\n"
        "with tempfile.NamedTemporaryFile() as file:\n    print(file.write(bytes(1000)))\n"
    )
    outcome = run(sandbox, program)
    assert outcome.stdout == "thread\nloop\nprocess\n[1, 2]\n1000\n", outcome.stderr


def test_the_network_is_not_there(sandbox: Bubblewrap) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        abstract.bind(f"\0sandbox-test-{os.getpid()}")
        abstract.listen()
        assert refused(sandbox, f"socket.create_connection(('127.0.0.1', {port}), 2)") != "not refused"
        assert refused(sandbox, "socket.getaddrinfo('example.org', 80)") == "gaierror"
        name = f"'\\0sandbox-test-{os.getpid()}'"
        assert refused(sandbox, f"socket.socket(socket.AF_UNIX).connect({name})") == "ConnectionRefusedError"
        with pytest.raises(TimeoutError):
            listener.accept()
    shown = run(sandbox, "import os; print(sorted(os.listdir('/sys')) if os.path.exists('/sys') else 'no')")
    assert shown.stdout == "no\n"


def test_vsock_which_no_network_namespace_confines_is_refused(sandbox: Bubblewrap) -> None:
    assert refused(sandbox, "socket.socket(40, socket.SOCK_STREAM)") == "PermissionError"
    assert refused(sandbox, "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)") == "PermissionError"


def test_files_of_the_host_are_not_there(sandbox: Bubblewrap, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    project = Path(__file__).parents[2]
    for path in (
        secret,
        tmp_path,
        project,
        Path.home() / ".ssh",
        "/etc/passwd",
        "/etc/shadow",
        "/run",
        "/var",
    ):
        assert refused(sandbox, f"os.stat({str(path)!r})") == "FileNotFoundError", path
    listed = run(sandbox, "import os; print(*os.listdir('/'), *os.listdir('/etc'))").stdout.split()
    # The interpreter's own directory may be anywhere.
    own = Path(sys.base_prefix).parts[1]
    system = {"bin", "lib", "lib64", "usr", "etc", "ld.so.cache"}
    assert set(listed) <= {"program.py", "tmp", "dev", "proc", own} | system


def test_the_environment_is_empty(sandbox: Bubblewrap) -> None:
    program = (
        "import glob, os\n"
        "print(sorted(os.environ))\n"
        "for path in glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline'):\n"
        "    print(path, open(path).read())\n"
    )
    outcome = run(sandbox, program)
    assert outcome.succeeded and "SANDBOX_TEST_KEY" not in outcome.stdout
    assert "PATH" in outcome.stdout


@pytest.mark.parametrize(
    "directory", ["/", "/usr", "/usr/bin", "/usr/lib", "/dev", "/proc/sys/kernel", "/proc/1"]
)
def test_nothing_but_tmp_can_be_written(sandbox: Bubblewrap, directory: str) -> None:
    assert refused(sandbox, f"open({directory!r} + '/written', 'w')") != "not refused"
    assert refused(sandbox, "open('/program.py', 'w')") != "not refused"
    assert refused(sandbox, "open('/proc/sys/kernel/core_pattern', 'w')") != "not refused"
    assert refused(sandbox, "open('/tmp/written', 'w')") == "not refused"


def test_links_out_of_tmp_lead_nowhere(sandbox: Bubblewrap, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text(SECRET)
    make = f"os.symlink({str(target)!r}, '/tmp/link'); "
    assert refused(sandbox, f"{make} open('/tmp/link')") == "FileNotFoundError"
    assert refused(sandbox, f"{make} open('/tmp/link', 'w')") == "FileNotFoundError"
    assert refused(sandbox, f"os.link({str(target)!r}, '/tmp/hard')") == "FileNotFoundError"
    assert refused(sandbox, "open('/tmp/' + '../' * 20 + 'etc/passwd')") == "FileNotFoundError"
    assert target.read_text() == SECRET


def test_processes_of_the_host_cannot_be_seen(sandbox: Bubblewrap, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    ours = os.getpid()
    program = (
        "import os\n"
        "pids = [name for name in os.listdir('/proc') if name.isdigit()]\n"
        "print(len(pids) < 10, os.path.exists('/proc/1/root" + str(tmp_path) + "/secret'))\n"
        "for pid in pids:\n"
        "    print(open(f'/proc/{pid}/environ').read())\n"
        "    print([os.readlink(f'/proc/{pid}/fd/{fd}') for fd in os.listdir(f'/proc/{pid}/fd')])\n"
    )
    outcome = run(sandbox, program)
    assert outcome.stdout.startswith("True False\n"), outcome.stderr
    if ours > 1000:  # small numbers are taken in every namespace
        assert refused(sandbox, f"open('/proc/{ours}/environ')") == "FileNotFoundError"
        assert refused(sandbox, f"os.kill({ours}, 0)") == "ProcessLookupError"


def test_the_program_inherits_its_three_streams_and_nothing_else(sandbox: Bubblewrap) -> None:
    program = "import os\nprint([fd for fd in range(3, 1024) if os.path.exists(f'/proc/self/fd/{fd}')])"
    assert run(sandbox, program).stdout == "[]\n"
    # Its stdin is a file of ours in memory: it can only be read.
    for how in (
        "os.write(0, b'x')",
        "os.ftruncate(0, 10)",
        "os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'x')",
    ):
        assert refused(sandbox, how) in ("PermissionError", "OSError"), how


@pytest.mark.parametrize(
    "call",
    [
        "libc.ptrace(16, 1, 0, 0)",
        "libc.unshare(0x10000000)",
        "libc.setns(0, 0)",
        "libc.mount(b'x', b'/tmp', b'tmpfs', 0, b'size=1g')",
        "libc.umount2(b'/tmp', 2)",
        "libc.memfd_create(b'x', 0)",
        "libc.shmget(0, 4096, 0o1600)",
        "libc.syscall(425, 1, 0)",
        "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",
    ],
)
def test_system_calls_that_would_leave_or_outgrow_the_sandbox(sandbox: Bubblewrap, call: str) -> None:
    if "syscall(56" in call and os.uname().machine != "x86_64":
        pytest.skip("the number of clone is that of x86_64")
    assert refused(sandbox, f"check({call})") == "PermissionError"


def test_no_capability_and_no_way_to_one(sandbox: Bubblewrap) -> None:
    program = (
        "print([l.split()[1] for l in open('/proc/self/status') if l[:3] == 'Cap' or 'NoNewPrivs' in l])"
    )
    assert run(sandbox, program).stdout == f"{['0' * 16] * 5 + ['1']}\n"
    assert refused(sandbox, "os.setuid(0)") == "OSError"  # its namespace has no such user
    assert refused(sandbox, "os.chroot('/tmp')") == "PermissionError"
    ids = run(sandbox, "import os; print(os.getuid(), os.getgid(), os.getgroups())").stdout
    assert ids.startswith(f"{NOBODY} {NOBODY} ")


def test_root_does_not_lend_its_user(sandbox: Bubblewrap) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can have another user's processes")
    seen: list[int] = []
    thread = threading.Thread(target=run, args=(sandbox, "import time; time.sleep(2)"))
    thread.start()
    while thread.is_alive() and not seen:
        seen = [
            pid
            for pid in processes()
            if b"time.sleep(2)" not in cmdline(pid) and b"/program.py" in cmdline(pid)
        ]
        users = {os.stat(f"/proc/{pid}").st_uid for pid in seen if os.path.exists(f"/proc/{pid}")}
    thread.join()
    assert seen and users <= {NOBODY}


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def running(mark: str) -> list[int]:
    return [pid for pid in processes() if mark.encode() in cmdline(pid)]


def test_a_fork_bomb(sandbox: Bubblewrap) -> None:
    program = (
        "import os\nforks = 0\n"
        "while True:\n    try:\n        os.fork()\n    except OSError:\n        forks += 1\n"
    )
    before = len(processes())
    seen: list[int] = []
    done = threading.Event()

    def count() -> None:
        while not done.wait(0.2):
            seen.append(len(processes()))

    counter = threading.Thread(target=count)
    counter.start()
    outcome = run(sandbox, program)
    done.set()
    counter.join()
    assert outcome.ended == "time"
    assert max(seen) - before < 3 * LIMITS.processes
    assert run(sandbox, "print(1)").succeeded


def test_the_limit_of_processes_is_each_programs_own(sandbox: Bubblewrap) -> None:
    program = (
        "import os, time\nchildren = 0\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0:\n            time.sleep(10)\n            os._exit(0)\n"
        "        children += 1\n"
        "except OSError:\n    print(children, flush=True)\n"
        "time.sleep(1)\n"
    )
    with ThreadPoolExecutor(3) as threads:
        outcomes = list(threads.map(lambda _: run(sandbox, program), range(3)))
    counts = [int(outcome.stdout) for outcome in outcomes]
    assert all(LIMITS.processes - 4 <= count < LIMITS.processes for count in counts), counts


def test_a_gigabyte_of_output(sandbox: Bubblewrap) -> None:
    for stream in ("stdout", "stderr"):
        program = f"import sys\nfor _ in range(1024):\n    sys.{stream}.write('x' * 2**20)"
        outcome = run(sandbox, program)
        assert (outcome.ended, outcome.exit_code) == ("output", None)
        assert len(getattr(outcome, stream)) == LIMITS.output
    quick = run(sandbox, f"import os\nos.write(1, b'x' * {LIMITS.output})")
    assert quick.ended == "exit" and len(quick.stdout) == LIMITS.output


def test_memory_of_one_process(sandbox: Bubblewrap) -> None:
    outcome = run(sandbox, "kept = []\nwhile True:\n    kept.append(b'x' * 2**24)")
    assert (outcome.ended, outcome.exit_code) == ("memory", 1)
    huge = run(sandbox, "bytearray(2**40)")
    assert huge.ended == "memory"


def test_memory_of_many_processes_together(sandbox: Bubblewrap) -> None:
    program = (
        "import os, time\nfor _ in range(3):\n    os.fork()\nkept = b'x' * (200 * 2**20)\ntime.sleep(60)\n"
    )
    outcome = run(sandbox, program)
    assert (outcome.ended, outcome.exit_code) == ("memory", None)


def test_a_program_that_sleeps_or_computes_for_ever(sandbox: Bubblewrap) -> None:
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
        "from isotrain.sandbox.base import Limits\nfrom isotrain.sandbox.bubblewrap import Bubblewrap\n"
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


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_close_ends_what_runs_and_refuses_the_rest() -> None:
    with bubblewrap(LIMITS) as sandbox, ThreadPoolExecutor(1) as threads:
        running = threads.submit(sandbox.run, "import time; time.sleep(600)")
        time.sleep(0.3)
        sandbox.close()
        with pytest.raises(SandboxError, match="closed"):
            running.result(timeout=BOUND)
        with pytest.raises(SandboxError, match="closed"):
            sandbox.run("print(1)")


def test_without_bubblewrap_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    written = tmp_path / "written"
    sandbox = Bubblewrap(LIMITS)
    for attempt in (sandbox.start, lambda: sandbox.run(f"open({str(written)!r}, 'w')")):
        with pytest.raises(
            SandboxError, match=r"not installed: install bubblewrap .*apt-get install bubblewrap"
        ):
            attempt()
    assert not written.exists()


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo --size --json-status-fd", "has no --disable-userns and no --clearenv and no --ro-bind-data"),
        (
            'case "$1" in --help) echo --size --disable-userns --json-status-fd --clearenv --ro-bind-data;; '
            "*) echo 'bwrap: No permissions to create new namespace' >&2; exit 1;; esac",
            "No permissions to create new namespace; allow user namespaces: sysctl -w .*--security-opt",
        ),
    ],
)
def test_a_bubblewrap_that_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    for directory in tmp_path.parents:  # the user that programs run as must reach it
        if directory.stat().st_uid == os.geteuid() and directory.name:
            directory.chmod(directory.stat().st_mode | 0o111)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=told):
        Bubblewrap(LIMITS).start()


def test_a_proc_that_cannot_be_mounted_is_left_out(sandbox: Bubblewrap) -> None:
    """As in containers, where parts of /proc are covered and others read-only."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("covering a part of /proc needs root and unshare")
    code = (
        "from isotrain.sandbox.base import Limits\nfrom isotrain.sandbox.bubblewrap import Bubblewrap\n"
        "sandbox = Bubblewrap(Limits())\nsandbox.start()\n"
        "print(sandbox.run('import os; print(os.path.exists(\"/proc/1\"), 6 * 7)').stdout)"
    )
    covered = (
        "mount -t tmpfs none /proc/bus && mount --bind /proc/sys /proc/sys && "
        'mount -o remount,bind,ro /proc/sys && exec "$0" -c "$1"'
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", covered, sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "False 42", done.stderr


def test_an_environment_of_the_users_choice(tmp_path: Path) -> None:
    with bubblewrap(LIMITS, python="/usr/bin/python3") as sandbox:
        shown = run(sandbox, "import sys; print(sys.prefix)")
    assert shown.stdout == "/usr\n"
    private = tmp_path / "private"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", private], check=True, timeout=60)
    private.chmod(0o700)
    if os.geteuid() == 0:
        with pytest.raises(
            SandboxError, match=r"Permission denied; name a Python in a directory that all users"
        ):
            Bubblewrap(LIMITS, python=str(private / "bin" / "python")).start()
    with pytest.raises(SandboxError, match=r"nowhere/python is not a Python that runs here"):
        Bubblewrap(LIMITS, python=f"{tmp_path}/nowhere/python").start()


def test_an_ordinary_user_has_the_same_sandbox(sandbox: Bubblewrap, tmp_path: Path) -> None:
    if os.geteuid() != 0 or not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("another user can be taken on by root, and needs a Python that all can read")
    source = Path(__file__).parents[2] / "src" / "isotrain"
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        package = Path(directory) / "isotrain"
        shutil.copytree(source / "sandbox", package / "sandbox")
        shutil.copy(source / "errors.py", package)
        (package / "__init__.py").touch()
        os.chmod(directory, 0o755)
        code = (
            "from isotrain.sandbox.base import Limits\nfrom isotrain.sandbox.bubblewrap import Bubblewrap\n"
            "sandbox = Bubblewrap(Limits(seconds=5, memory=2**28))\nsandbox.start()\n"
            "print(sandbox.run('import os; print(os.getuid(), os.path.exists(\"/etc/passwd\"))').stdout)\n"
            "print(sandbox.run('import os\\nwhile True: os.fork()').exit_code)\n"
            "print(sandbox.run('b\"x\" * 2**29').ended)\n"
        )
        done = subprocess.run(
            ["/usr/bin/python3", "-B", "-c", code],
            user=4321,
            group=4321,
            extra_groups=[],
            env={"PYTHONPATH": directory, "PATH": os.environ["PATH"]},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.stdout.split() == [str(NOBODY), "False", "1", "memory"], done.stderr
