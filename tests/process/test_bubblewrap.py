"""Where bubblewrap is missing, broken or restricted, and who runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hostile import LIMITS, run

from isotrain.errors import SandboxError
from isotrain.process.bubblewrap import NOBODY, Bubblewrap
from sandboxes import bubblewrap


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
        "from isotrain.process.sandbox import Limits\nfrom isotrain.process.bubblewrap import Bubblewrap\n"
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
        with pytest.raises(SandboxError, match=r"Permission denied; name a Python that all users can read"):
            Bubblewrap(LIMITS, python=str(private / "bin" / "python")).start()
    with pytest.raises(SandboxError, match=r"nowhere/python is not a Python that runs here"):
        Bubblewrap(LIMITS, python=f"{tmp_path}/nowhere/python").start()


def test_an_ordinary_user_has_the_same_sandbox(sandbox: Bubblewrap, tmp_path: Path) -> None:
    if os.geteuid() != 0 or not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("another user can be taken on by root, and needs a Python that all can read")
    source = Path(__file__).parents[2] / "src" / "isotrain"
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        package = Path(directory) / "isotrain"
        shutil.copytree(source / "process", package / "process")
        for module in ("errors.py", "language.py"):
            shutil.copy(source / module, package)
        (package / "__init__.py").touch()
        os.chmod(directory, 0o755)
        code = (
            "from isotrain.process.sandbox import Limits\n"
            "from isotrain.process.bubblewrap import Bubblewrap\n"
            "sandbox = Bubblewrap(Limits(seconds=5, memory=2**28))\nsandbox.start()\n"
            "print(sandbox.run('import os; print(os.getuid(), os.path.exists(\"/etc/passwd\"))').stdout)\n"
            # The children stay, so that the program itself meets the limit.
            "fork = 'import os, time\\nfor _ in range(99): os.fork() or time.sleep(9)'\n"
            "print(sandbox.run(fork).exit_code)\n"
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
