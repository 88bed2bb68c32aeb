"""Joining clusters: private ones, running ones, and those that must not be joined."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from plain_workers import Clerk

import isotrain
from isotrain.children import make_held, remove_abandoned
from isotrain.cluster import connect, private
from isotrain.cluster.connect import (
    ClusterReply,
    Node,
    check_authentication,
    find_cluster,
    join_cluster,
    knock,
    own_cluster,
    several_machines,
)
from isotrain.cluster.private import PREFIX, TIMED_OUT, copy_worker_output, private_cluster
from isotrain.cluster.workers import Member, WorkerGroup
from isotrain.device.cpu import Cpu
from isotrain.device.detect import DEVICES
from isotrain.errors import RETRYABLE, ClusterError, DeviceError, WorkerLost
from isotrain.recipe.online import ClusterSection

pytestmark = pytest.mark.ray

TOKEN = "5e" * 32

# A driver that starts a private cluster with one worker, says its token, and waits or ends as it is told.
DRIVER = """
import os, sys, time
import ray
from plain_workers import Clerk
from isotrain.cluster.connect import join_cluster
from isotrain.cluster.workers import Member, WorkerGroup
from isotrain.device.cpu import Cpu
from isotrain.recipe.online import ClusterSection
with join_cluster(ClusterSection(address="local"), Cpu(), cpus=1) as cluster:
    group = WorkerGroup("clerk", Clerk, [Member()], start_timeout=60)
    group.submit(Clerk.sleep, 600)
    try:
        # Within the block: the signal may come as soon as the line is out.
        print(os.environ["RAY_AUTH_TOKEN"], cluster.logs.parents[2], flush=True)
        time.sleep(600)
    finally:
        print("left in order", flush=True)
"""


def processes_with(token: str) -> dict[int, str]:
    """Processes, other than this one, whose environment has a cluster's token."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if token.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "comm").read_text().strip()
            except OSError:
                continue
    return found


def wait_until_gone(token: str, seconds: float, but: tuple[str, ...] = ()) -> None:
    deadline = time.monotonic() + seconds
    while left := [name for name in processes_with(token).values() if name not in but]:
        assert time.monotonic() < deadline, f"still running after {seconds} s: {left}"
        time.sleep(0.1)


# They wait for about a minute for a head that does not come back.
AGENTS = ("ray::DashboardA", "ray::RuntimeEnv")


def end(token: str) -> None:
    for pid in processes_with(token):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_private_cluster_is_alone_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    handler = signal.getsignal(signal.SIGTERM)
    with join_cluster(ClusterSection(address="local"), Cpu(), cpus=3, keep_logs=tmp_path / "logs") as cluster:
        assert cluster.private and cluster.address.startswith("127.0.0.1:")
        assert ray.cluster_resources()["CPU"] == 3
        home = cluster.logs.parents[2]
        assert home.stat().st_mode & 0o077 == 0
        token = os.environ["RAY_AUTH_TOKEN"]
        with WorkerGroup("clerk", Clerk, [Member()], start_timeout=60) as group:
            group.call(Clerk.say, "a word from a worker")
            ours = {*processes_with(token), os.getpid()}
            assert len(ours) > 4
            # A signal to the group of the controller is the controller's.
            assert [pid for pid in processes_with(token) if os.getpgid(pid) == os.getpgrp()] == []
            listening = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
            lines = [line for line in listening.splitlines() if any(f"pid={pid}," in line for pid in ours)]
            own = [line.split()[3] for line in lines]
            assert len(own) > 4
            assert [address for address in own if "127.0.0.1" not in address] == []
        assert knock(cluster.address, 30, stranger=True) is ClusterReply.REFUSED
        assert knock(cluster.address, 30) is ClusterReply.OPEN
        with (
            pytest.raises(ClusterError, match="connected to a Ray cluster already"),
            join_cluster(ClusterSection(), Cpu()),
        ):
            pass
    assert not ray.is_initialized()
    wait_until_gone(token, 5)
    assert not home.exists()
    assert "RAY_AUTH_TOKEN" not in os.environ
    assert signal.getsignal(signal.SIGTERM) == handler
    assert not (tmp_path / ".ray").exists()
    assert any("a word from a worker" in file.read_text() for file in (tmp_path / "logs").glob("*.err"))
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err == ""


def test_a_start_that_took_too_long_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine so busy that Ray's own half a minute is over."""
    init, tries = ray.init, []

    def slow_at_first(**options: Any) -> Any:
        tries.append(options["_temp_dir"])
        if len(tries) == 1:
            raise Exception(f"The current node {TIMED_OUT}. This could happen because ...")
        return init(**options)

    monkeypatch.setattr(ray, "init", slow_at_first)
    with private_cluster({}, 1, None) as logs:
        assert ray.is_initialized() and logs.is_dir()
    assert len(set(tries)) == 2


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signals_end_a_private_cluster(how: signal.Signals) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, stderr=-3)
    assert driver.stdout is not None
    try:
        token, home = driver.stdout.readline().split()
        driver.send_signal(how)
        assert driver.wait(timeout=20) == (143 if how is signal.SIGTERM else -signal.SIGINT)
        assert driver.stdout.read() == "left in order\n"
        wait_until_gone(token, 5)
        assert not Path(home).exists()
    finally:
        driver.kill()


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_driver() -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, stderr=-3)
    assert driver.stdout is not None
    token, _ = driver.stdout.readline().split()
    driver.kill()
    driver.wait()
    wait_until_gone(token, 15, but=AGENTS)
    end(token)


@pytest.mark.parametrize("head", ["gcs_server", "raylet"])
def test_a_driver_does_not_wait_for_a_dead_ray(head: str) -> None:
    """Ray alone ends it after a minute, with the exit code of an error that needs a change."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None and driver.stderr is not None
    try:
        token, home = driver.stdout.readline().split()
        (victim,) = [pid for pid, name in processes_with(token).items() if name == head]
        os.kill(victim, signal.SIGKILL)
        assert driver.wait(timeout=50) == RETRYABLE
        assert f"error: {head}, a process of the private Ray cluster, died" in driver.stderr.read()
        assert not Path(home).exists()
        wait_until_gone(token, 15, but=AGENTS)
    finally:
        driver.kill()
        end(token)


def test_what_a_killed_driver_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left, held = tmp_path / f"{PREFIX}left", make_held(tmp_path, PREFIX)
    left.mkdir()
    for path in (left, held):
        os.utime(path, (0, 0))
    remove_abandoned(tmp_path, PREFIX)
    assert not left.exists() and held.exists()


@pytest.fixture(scope="module")
def running() -> Iterator[str]:
    """The address of a cluster that asks for TOKEN, as `ray start` makes it but on the loopback address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as home:
        environment = {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
        }
        head = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"),
                *("--node-ip-address=127.0.0.1", "--include-dashboard=false", "--num-cpus=2"),
                *("--object-store-memory=100000000", f"--temp-dir={home}"),
            ],
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert knock(f"127.0.0.1:{port}", 60, stranger=True) is ClusterReply.REFUSED
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            head.wait(timeout=30)
            wait_until_gone(TOKEN, 20)


@pytest.mark.parametrize("token", [None, "00" * 32])
def test_says_that_a_cluster_needs_a_token(
    running: str, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    if token:
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with (
        pytest.raises(ClusterError, match=r"needs a token.*RAY_AUTH_MODE=token"),
        join_cluster(ClusterSection(address=running), Cpu()),
    ):
        pass


@pytest.mark.parametrize("by", ["address", "RAY_ADDRESS"])
def test_a_running_cluster_is_joined_and_left_running(
    running: str, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    section = ClusterSection(address=running) if by == "address" else ClusterSection()
    if by == "RAY_ADDRESS":
        monkeypatch.setenv("RAY_ADDRESS", running)
    with join_cluster(section, Cpu()) as cluster:
        assert cluster.address == running and not cluster.private
        assert cluster.introduction == f"joined the Ray cluster at {running}"
        with WorkerGroup("clerk", Clerk, [Member(("guest",))], start_timeout=60) as group:
            assert group.call(Clerk.say, "hello") == ["guest: hello"]
        check_authentication(running, 30)
    assert not ray.is_initialized()
    assert knock(running, 30) is ClusterReply.OPEN


def _can_isolate() -> bool:
    if not all(map(shutil.which, ("unshare", "ip"))):
        return False
    return (
        subprocess.run(["unshare", "-rn", "ip", "link", "set", "lo", "up"], capture_output=True).returncode
        == 0
    )


@pytest.mark.skipif(not _can_isolate(), reason="no network namespaces here")
def test_a_cluster_without_authentication_is_joined_with_a_warning() -> None:
    """A single machine's; `ray start` listens on all interfaces, and so this has a network of its own."""
    child = Path(__file__).with_name("open_cluster.py")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "NPU_SIM"))}
    source = {"PYTHONPATH": str(Path(isotrain.__file__).parents[1])}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as home:
        done = subprocess.run(
            ["unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", sys.executable, child, home],
            env={**clean, **source, "HOME": home},  # a token of the user would make it another cluster
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "joined the Ray cluster at 127.0.0.1" in done.stdout
    assert "warning: this cluster runs code for anyone who reaches its ports" in done.stdout
    assert "ray get-auth-token --generate" in done.stdout


def test_says_that_nothing_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            pytest.raises(ClusterError, match=rf"no Ray cluster answered at {address} within 1 s.*ray start"),
            join_cluster(ClusterSection(address=address), Cpu(), answer_timeout=1),
        ):
            pass
        with pytest.raises(ClusterError, match=r"several machines.*get-auth-token.*allow_unauthenticated"):
            check_authentication(address, 1)


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "here", "10.0.0.1"])
def test_addresses_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with (
        pytest.raises(ClusterError, match=r"RAY_ADDRESS: cannot use .*host:port"),
        join_cluster(ClusterSection(), Cpu()),
    ):
        pass


def test_only_our_own_file_says_which_cluster_to_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, link = tmp_path / "ray_current_cluster", tmp_path / "link"
    assert own_cluster(file) is None
    file.write_text("10.0.0.1:6379\n")
    link.symlink_to(file)
    assert own_cluster(file) == "10.0.0.1:6379"
    assert own_cluster(link) is None, "anybody can make one to a file of ours"
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert own_cluster(file) is None
    # And so a private one is started; nobody is asked, with our token or without.
    monkeypatch.setattr(connect, "get_ray_address_file", lambda _: str(file))
    monkeypatch.setattr(connect, "knock", pytest.fail)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert find_cluster("auto", 1) is None


def test_a_private_cluster_needs_the_device_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(DEVICES["cuda"]), "available", lambda self: False)
    with (
        pytest.raises(DeviceError, match="no 'cuda' device is usable here"),
        join_cluster(ClusterSection(address="local"), DEVICES["cuda"]),
    ):
        pass


def test_ray_starts_no_cluster_by_itself() -> None:
    with pytest.raises(ray.exceptions.RaySystemError, match="not been started"):
        ray.put(1)


def test_machines_are_counted_by_their_addresses() -> None:
    assert not several_machines([Node("a", "10.0.0.1")])
    assert not several_machines([Node("a", "10.0.0.1"), Node("b", "10.0.0.1")])
    assert several_machines([Node("a", "10.0.0.1"), Node("b", "10.0.0.2")])


def test_logs_that_cannot_be_kept_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "r" / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text("words")
    (tmp_path / "full").write_text("a file where a directory should be made")
    copy_worker_output(tmp_path, tmp_path / "full" / "logs")
    assert "warning: the output of workers could not be kept" in capsys.readouterr().err


def test_a_machine_that_is_too_busy_to_start_ray_may_be_less_busy_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(*_: object) -> Path:
        raise RuntimeError(f"{private.TIMED_OUT}. This could happen because the GCS has become overloaded.")

    monkeypatch.setattr(private, "_init", too_late)
    with pytest.raises(WorkerLost, match="cannot start a private Ray cluster, at the second try") as raised:
        private._start(tmp_path, {}, 1)
    assert raised.value.may_pass


def test_more_ranks_than_devices_start_no_cluster() -> None:
    """A private one would be started first, and then lack them."""
    cores = max(len(os.sched_getaffinity(0)), os.cpu_count() or 1)
    with (
        pytest.raises(
            ClusterError, match=rf"device\.ranks: {cores + 1} ranks need {cores + 1} CPU, but this machine"
        ),
        join_cluster(ClusterSection(address="local"), Cpu(), ranks=cores + 1),
    ):
        raise AssertionError("a cluster was started")
    assert not ray.is_initialized()
