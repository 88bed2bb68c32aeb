"""Hostile programs in bubblewrap: the host, its files, network and processes are out of reach."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
from hostile import SECRET, cmdline, processes, refused, run

from isotrain.process.bubblewrap import NOBODY, Bubblewrap


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
    for family in (40, socket.AF_NETLINK, socket.AF_PACKET, 30, 38):  # vsock; TIPC; the kernel's cryptography
        assert refused(sandbox, f"socket.socket({int(family)}, socket.SOCK_RAW)") == "PermissionError"
        assert refused(sandbox, f"socket.socketpair({int(family)}, socket.SOCK_STREAM)") == "PermissionError"
    assert refused(sandbox, "socket.socketpair()") == "not refused"


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
        "libc.syscall(438, 0, 0, 0)",
        "libc.syscall(442, 0, b'/tmp', 0, 0, 0)",
        *("libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)", "libc.syscall(0x40000000 | 39)"),
        *("libc.syscall(101, 16, 1, 0, 0)", "libc.syscall(103, 3, 0, 0)", "libc.syscall(248, 0, 0, 0, 0, 0)"),
        *(
            "libc.syscall(250, 0, -3, 1)",
            "libc.syscall(298, 0, 0, -1, -1, 0)",
            "libc.syscall(312, 1, 1, 0, 0, 0)",
        ),
        *("libc.syscall(310, 1, 0, 0, 0, 0, 0)", "libc.syscall(311, 1, 0, 0, 0, 0, 0)"),
        *("libc.syscall(321, 0, 0, 0)", "libc.syscall(323, 1)"),
    ],
)
def test_system_calls_that_would_leave_or_outgrow_the_sandbox(sandbox: Bubblewrap, call: str) -> None:
    number = re.search(r"syscall\((?:0x40000000 \| )?([0-9]+)", call)
    if number and int(number[1]) < 424 and os.uname().machine != "x86_64":
        pytest.skip("the number of the call is that of x86_64")
    assert refused(sandbox, f"check({call})") == "PermissionError"


def test_calls_of_the_32_bit_architecture_end_the_program(sandbox: Bubblewrap) -> None:
    """Their numbers mean other calls, so that no filter of numbers holds for them."""
    if os.uname().machine != "x86_64":
        pytest.skip("the instructions are those of x86_64")
    program = (
        "import ctypes, mmap\n"
        "code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        "code.write(bytes.fromhex('b814000000cd80c3'))  # mov eax, 20 (getpid); int 0x80; ret\n"
        "call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))\n"
        "print('before', flush=True)\nprint(call())\n"
    )
    outcome = run(sandbox, program)
    assert (outcome.stdout, outcome.exit_code) == ("before\n", 128 + signal.SIGSYS)


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
    users: set[int] = set()
    while thread.is_alive() and not users:
        seen = [pid for pid in processes() if b"/program.py" in cmdline(pid)]
        users = {os.stat(f"/proc/{pid}").st_uid for pid in seen if os.path.exists(f"/proc/{pid}")}
    thread.join()
    assert seen and users == {NOBODY}
