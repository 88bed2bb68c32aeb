"""A private Ray cluster: on the loopback address, behind a token that nobody else has."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from isotrain.children import make_held, remove_abandoned
from isotrain.errors import RETRYABLE, ClusterError, WorkerLost

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
# Ray's sockets are below its directory, and a socket's path has at most 107 characters.
LONGEST_ROOT = 20
PREFIX = "iso-ray-"
SYSTEM_CONFIG = {
    # Engines have processes of their own, which must not outlive a worker that was killed.
    "process_group_cleanup_enabled": True,
    # Workers are no background jobs: Ray would let every other process of the machine go first.
    "worker_niceness": 0,
    # An engine's threads wait for each other: each moment that Ray takes from one is lost for all of them.
    "prestart_worker_first_driver": False,
    "enable_metrics_collection": False,
    "enable_timeline": False,
}

HEAD_SECONDS = 1.0
"""Between two looks at Ray's processes."""
TIMED_OUT = "timed out during startup"


@contextmanager
def private_cluster(
    resources: dict[str, float],
    cpus: int | None,
    keep_logs: Path | None,
    is_ending: Callable[[], bool] = lambda: False,
) -> Iterator[Path]:
    """Start it with the given devices, connect, end it; yields the directory of the workers' output.

    With `keep_logs`, that output is copied there in the end; otherwise it is removed with all else. If Ray
    dies within, so does this process, unless it `is_ending` in an orderly way.
    """
    root = tempfile.gettempdir() if len(tempfile.gettempdir()) <= LONGEST_ROOT else "/tmp"
    remove_abandoned(Path(root), PREFIX)
    # Ray opens its directory to all users: ours around it stays closed.
    home = make_held(Path(root), PREFIX)
    try:
        with _loopback(), _own_token(), _own_process_groups():
            try:
                logs = _start(home, resources, cpus)
                with _ending_with_ray(home, keep_logs, is_ending):
                    yield logs
            finally:
                ray.shutdown()
                if keep_logs is not None:
                    copy_worker_output(home, keep_logs)
    finally:
        shutil.rmtree(home, ignore_errors=True)
        remove_abandoned(Path(root), PREFIX)


@contextmanager
def _ending_with_ray(home: Path, keep_logs: Path | None, is_ending: Callable[[], bool]) -> Iterator[None]:
    """Within, the death of Ray's own head ends this process, as one that may pass.

    Calls would wait for it. After a minute, Ray would end the process with exit code 1 and no error of ours.
    """
    node: Any = ray._private.worker._global_node
    heads = {name: node.all_processes[name][0].process for name in ("gcs_server", "raylet")}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(HEAD_SECONDS):
            died = [name for name, process in heads.items() if process.poll() is not None]
            # What has killed it may have asked this process to end, too.
            if died and not done.wait(HEAD_SECONDS) and not is_ending():
                reason = f"{died[0]}, a process of the private Ray cluster, died"
                print(f"error: {reason}; run the same command again to resume", file=sys.stderr, flush=True)
                if keep_logs is not None:
                    copy_worker_output(home, keep_logs)
                shutil.rmtree(home, ignore_errors=True)
                os._exit(RETRYABLE)

    threading.Thread(target=watch, name="ray-head", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _start(home: Path, resources: dict[str, float], cpus: int | None) -> Path:
    try:
        return _init(home / "r", home, resources, cpus)
    except Exception as error:
        if TIMED_OUT not in str(error):
            raise ClusterError(f"cannot start a private Ray cluster: {error}") from error
    # Ray gives itself half a minute, which a busy machine may not have; by now its files are in memory.
    ray.shutdown()
    try:
        return _init(home / "s", home, resources, cpus)
    except Exception as error:
        kind = WorkerLost if TIMED_OUT in str(error) else ClusterError  # it may be less busy later
        raise kind(f"cannot start a private Ray cluster, at the second try: {error}") from error


def _init(directory: Path, home: Path, resources: dict[str, float], cpus: int | None) -> Path:
    custom = {name: count for name, count in resources.items() if name != "GPU"}
    context: Any = ray.init(
        address="local",
        num_cpus=cpus,
        num_gpus=int(resources["GPU"]) if "GPU" in resources else None,
        resources=custom or None,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(directory),
        _system_config=SYSTEM_CONFIG,
        **_object_store(home),
    )
    return Path(context["session_dir"]) / "logs"


def copy_worker_output(home: Path, target: Path) -> None:
    """Copy what workers wrote to their standard output and error, leaving out those that wrote nothing.

    A full disk is only told: it must not hide the error before it, nor keep the run from ending.
    """
    try:
        for file in sorted(home.glob("*/session_2*/logs/worker-*")):
            if file.suffix in (".out", ".err") and file.stat().st_size:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target / file.name)
    except OSError as error:
        print(f"warning: the output of workers could not be kept: {error}", file=sys.stderr, flush=True)


def _object_store(home: Path) -> dict[str, Any]:
    """Its size and place: a part of memory, in /dev/shm unless that is too small, as in many containers."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = min(8 * GIB, int(0.3 * memory))
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if free >= GIB // 2:
        return {"object_store_memory": min(size, int(0.8 * free))}
    return {"object_store_memory": min(size, GIB), "_plasma_directory": str(home)}


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """Within, Ray's processes start in groups of their own.

    A signal to the controller's group is meant for the controller, which still needs them to save a
    checkpoint. Their workers have groups of their own anyway. All of them end with the controller.

    A child `ray start --head --block` would not need this switch. But this process would still need
    `loopback_addresses` to connect to it, would have to find out its address and its time to start, and each
    start would import Ray in one more interpreter.
    """
    before = services.ConsolePopen

    class Popen(before):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, preexec_fn: Callable[[], None] | None, **options: Any) -> None:
            def prepare() -> None:
                os.setpgid(0, 0)
                if preexec_fn is not None:
                    preexec_fn()

            super().__init__(*args, preexec_fn=prepare, **options)

    services.ConsolePopen = Popen  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        services.ConsolePopen = before  # type: ignore[misc]


@contextmanager
def loopback_addresses() -> Iterator[None]:
    """Within, Ray keeps 127.0.0.1.

    Otherwise it replaces it with the machine's outer address. The switch is made for systems other than
    Linux, where Ray has no multi-node clusters.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _loopback() -> Iterator[None]:
    with loopback_addresses(), variables(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0"):
        yield


@contextmanager
def _own_token() -> Iterator[None]:
    # Ray alone would write a token, readable for all, into the user's home directory.
    try:
        with variables(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32)):
            read_authentication_again()
            yield
    finally:
        read_authentication_again()


def has_token() -> bool:
    """Whether the user has a token, in the environment or in the home directory."""
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()
    return bool(loader.has_token(ignore_auth_mode=True))


def read_authentication_again() -> None:
    """Ray keeps the mode and the token that it first saw in this process."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def variables(**values: str) -> Iterator[None]:
    """Environment variables that have these values within."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
