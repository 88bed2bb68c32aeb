"""Programs in namespaces of their own, made by bubblewrap: no network, no files of the host, hard limits."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

from isotrain.errors import SandboxError
from isotrain.process.seccomp import MACHINES, seccomp_filter
from isotrain.process.supervise import Limits, ProgramOutcome, supervise

INSTALL = "install bubblewrap 0.8 or newer (apt-get install bubblewrap, or dnf install bubblewrap)"
NAMESPACES = (
    "allow user namespaces: sysctl -w user.max_user_namespaces=15000, on Ubuntu 24.04 also "
    "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0; start a container with --security-opt "
    "seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"
)
READABLE = "name a Python that all users can read: where isotrain runs as root, programs run as nobody"
VISIBLE = (
    "isotrain reads /proc/PID/statm and /proc/PID/task/TID/children of them: mount /proc without hidepid, "
    "and use a kernel with CONFIG_PROC_CHILDREN"
)
# Where this process is root the program is not: limits on processes do not hold for root.
NOBODY = 65534
LONGEST_PROGRAM = 4 << 20
_FIRST_RUN = 30.0
_GREETING = "isotrain"
# A program whose child, not itself, has more memory than it may have.
_PROBE_LIMIT = 32 << 20
_PROBE = """import os, time
if os.fork() == 0:
    kept = b"x" * (48 << 20)
    time.sleep(60)
os.wait()
"""
_memory_is_measured = False
_TMP_FOR_SEMAPHORES = 1 << 20
# What old versions lack, so that their own message would be about the option.
_NEEDED_OPTIONS = ("--size", "--disable-userns", "--json-status-fd", "--clearenv", "--ro-bind-data")
_SYSTEM = "/usr/bin:/bin"
_ENVIRONMENT = {
    "PATH": _SYSTEM,
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    # Each of their threads reserves address space.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


@dataclass(frozen=True)
class Python:
    """An interpreter, with the directories that it needs."""

    executable: str
    directories: tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """Options that not every kernel or container allows; seccomp refuses nested namespaces in any case."""

    proc: bool = True
    disable_userns: bool = True


_KERNELS = (Kernel(), Kernel(disable_userns=False), Kernel(proc=False), Kernel(False, False))


class Bubblewrap:
    def __init__(self, limits: Limits, python: str | None = None) -> None:
        """`python`: the interpreter for programs, with the packages of its environment; by default the one
        that isotrain runs on, without those of a virtual environment, or else the system's."""
        self._limits, self._executable = limits, python
        self._closing = Event()
        self._chosen: tuple[Python, Kernel] | None = None

    def start(self) -> None:
        self._choose()

    def run(self, program: str, stdin: str = "", seconds: float | None = None) -> ProgramOutcome:
        python, kernel = self._chosen or self._choose()
        most = self._limits.seconds if seconds is None else min(seconds, self._limits.seconds)
        return self._run(python, kernel, program, stdin, most)

    def close(self) -> None:
        self._closing.set()

    def _choose(self) -> tuple[Python, Kernel]:
        """The first interpreter that runs in the strictest sandbox that this kernel can make."""
        _check_installation()
        problem: SandboxError | None = None
        for python in _interpreters(self._executable):
            for kernel in _KERNELS:
                try:
                    outcome = self._run(python, kernel, f"print({_GREETING!r})", "", _FIRST_RUN)
                except SandboxError as error:
                    remedy = READABLE if "source path" in str(error) else NAMESPACES
                    problem = problem or SandboxError(f"{error}; {remedy}")
                    continue
                if outcome.stdout == f"{_GREETING}\n":
                    self._check_memory(python, kernel)
                    self._chosen = python, kernel
                    return self._chosen
                reason = outcome.stderr.strip()[-300:] or f"it ended by {outcome.ended}"
                problem = problem or SandboxError(
                    f"{python.executable} does not run in the sandbox: {reason}"
                )
        assert problem is not None
        raise problem

    def _check_memory(self, python: Python, kernel: Kernel) -> None:
        """Refuse to start where the memory of a program's child cannot be seen; once in a process."""
        global _memory_is_measured
        if _memory_is_measured:
            return
        limits = replace(self._limits, memory=_PROBE_LIMIT)
        outcome = self._run(python, kernel, _PROBE, "", _FIRST_RUN, limits)
        if outcome.ended != "memory":
            raise SandboxError(
                f"the memory of programs cannot be limited: {_PROBE_LIMIT >> 20} MiB were exceeded, and the "
                f"program ended by {outcome.ended}; {VISIBLE}"
            )
        _memory_is_measured = True

    def _run(
        self,
        python: Python,
        kernel: Kernel,
        program: str,
        stdin: str,
        seconds: float,
        supervised: Limits | None = None,
    ) -> ProgramOutcome:
        """`supervised`: other limits for what is measured from outside."""
        if self._closing.is_set():
            raise SandboxError("the sandbox is closed")
        source = program.encode("utf-8", "replace")
        if len(source) > LONGEST_PROGRAM:
            return ProgramOutcome(
                "memory", None, "", f"the program has more than {LONGEST_PROGRAM} bytes", 0.0
            )
        rules = seccomp_filter(platform.machine())
        try:
            with contextlib.ExitStack() as ours:
                with contextlib.ExitStack() as theirs:
                    files = [theirs.enter_context(_sealed(content)) for content in (source, rules)]
                    given = stdin.encode("utf-8", "replace")
                    files.append(theirs.enter_context(_sealed(given, against=fcntl.F_SEAL_GROW)))
                    stdout, stderr, status = (_pipe(ours, theirs) for _ in range(3))
                    process = self._start(python, kernel, files, [stdout[1], stderr[1], status[1]])
                pipes = stdout[0], stderr[0], status[0]
                return supervise(process, pipes, supervised or self._limits, self._closing, seconds)
        except OSError as error:  # such as no more processes or open files
            raise SandboxError(f"bubblewrap could not be started: {error}") from None

    def _start(
        self, python: Python, kernel: Kernel, files: list[int], writes: list[int]
    ) -> subprocess.Popen[bytes]:
        source, rules, stdin = files
        stdout, stderr, status = writes
        command = [
            *(shutil.which("bwrap") or "bwrap", *_namespaces(kernel), *_files(python, kernel, self._limits)),
            *("--ro-bind-data", str(source), "/program.py", "--remount-ro", "/", "--chdir", "/tmp"),
            *("--seccomp", str(rules), "--json-status-fd", str(status)),
            # bubblewrap's own first process would outlive bubblewrap, and be a zombie where nobody reaps it.
            *("--as-pid-1", "--", "/bin/sh", "-c", '"$@"; exit $?', "sh"),
            # Within the namespace, where the kernel counts the processes of this program alone.
            *("prlimit", *_resource_limits(self._limits), "--"),
            *(python.executable, "-s", "-B", "/program.py"),
        ]
        root = os.geteuid() == 0
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(source, rules, status),
            # Nothing for bubblewrap either: a program can read the environment of its first process.
            env={},
            cwd="/",
            start_new_session=True,
            user=NOBODY if root else None,
            group=NOBODY if root else None,
            extra_groups=[] if root else None,
        )


def _namespaces(kernel: Kernel) -> list[str]:
    arguments = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    arguments += ["--hostname", "sandbox", "--uid", str(NOBODY), "--gid", str(NOBODY), "--clearenv"]
    for name, value in _ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    return [*arguments, *(["--disable-userns"] if kernel.disable_userns else [])]


def _files(python: Python, kernel: Kernel, limits: Limits) -> list[str]:
    """Libraries and programs to read, /tmp to write to; nothing else is there."""
    arguments: list[str] = []
    for name in ("bin", "lib", "lib64"):
        arguments += ["--ro-bind-try", f"/usr/{name}", f"/usr/{name}"]
        if os.path.islink(f"/{name}"):
            arguments += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        else:
            arguments += ["--ro-bind-try", f"/{name}", f"/{name}"]
    arguments += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for directory in python.directories:
        arguments += ["--ro-bind-try", directory, directory]
    if kernel.proc:
        arguments += ["--proc", "/proc"]
    # Both file systems that bubblewrap itself makes, / and /dev, have no size: they end up read-only.
    arguments += ["--dev", "/dev", "--size", str(_TMP_FOR_SEMAPHORES), "--tmpfs", "/dev/shm"]
    return [*arguments, "--remount-ro", "/dev", "--size", str(limits.disk), "--tmpfs", "/tmp"]


def _resource_limits(limits: Limits) -> list[str]:
    values = {
        "as": limits.memory,
        "core": 0,
        "cpu": math.ceil(limits.seconds) + 1,
        "fsize": limits.disk,
        "nofile": limits.open_files,
        "nproc": limits.processes,
    }
    return [f"--{name}={value}:{value}" for name, value in values.items()]


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    """One to read from; each end is closed with its stack."""
    read, write = os.pipe()
    ours.callback(os.close, read)
    theirs.callback(os.close, write)
    return read, write


_UNCHANGEABLE = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


@contextlib.contextmanager
def _sealed(content: bytes, against: int = _UNCHANGEABLE) -> Iterator[int]:
    """A file in memory that nobody can change any more. A program may empty its stdin, so that a process
    of it which is started later cannot read it again; a file that grew would be memory without a limit."""
    with open(os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b") as file:
        file.write(content)
        file.flush()
        file.seek(0)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, against | fcntl.F_SEAL_SEAL)
        yield file.fileno()


def _check_installation() -> None:
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        raise SandboxError(
            f"bubblewrap is used on Linux on {' and '.join(MACHINES)}, not on {sys.platform} on "
            f"{platform.machine()}"
        )
    if not hasattr(os, "pidfd_open"):
        raise SandboxError("this Python has no os.pidfd_open: use one that was built for Linux 5.3 or newer")
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise SandboxError(f"bubblewrap is not installed: {INSTALL}")
    if shutil.which("prlimit", path=_SYSTEM) is None:
        raise SandboxError(f"there is no prlimit in {_SYSTEM}: install util-linux")
    try:
        version = subprocess.run([bubblewrap, "--help"], capture_output=True, text=True, timeout=30, env={})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"bubblewrap does not run: {error}; {INSTALL}") from None
    if version.returncode != 0:
        raise SandboxError(f"bubblewrap does not run: {version.stderr.strip()[-300:]}")
    lacking = [option for option in _NEEDED_OPTIONS if option not in version.stdout + version.stderr]
    if lacking:
        raise SandboxError(f"this bubblewrap has no {' and no '.join(lacking)}: {INSTALL}")


def _interpreters(executable: str | None) -> list[Python]:
    if executable is not None:
        return [_environment(executable)]
    base = os.path.realpath(sys.executable)
    pythons = [Python(base, _libraries(Path(sys.base_prefix)))]
    system = shutil.which("python3", path="/usr/bin")
    if system is not None and os.path.realpath(system) != base:
        pythons.append(Python(os.path.realpath(system), ()))
    return pythons


def _environment(executable: str) -> Python:
    """An interpreter of the user's choice, asked where its parts are."""
    code = "import sys, json; print(json.dumps([sys.prefix, sys.base_prefix]))"
    try:
        answer = subprocess.run([executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
        prefixes = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{executable} is not a Python that runs here: {error}") from None
    directories = (directory for prefix in prefixes for directory in _libraries(Path(prefix)))
    return Python(os.path.abspath(executable), tuple(dict.fromkeys(directories)))


def _libraries(prefix: Path) -> tuple[str, ...]:
    """The directories of an installation: a prefix of its own as a whole, of the system's only a part."""
    if str(prefix) in ("/usr", "/usr/local"):
        return tuple(str(prefix / name) for name in ("bin", "lib", "lib64"))
    return (str(prefix),)
