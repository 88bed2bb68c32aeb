"""A private Ray cluster: on the loopback address, behind a token that nobody else has."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from isotrain.errors import ClusterError

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
# Ray's sockets are below its directory, and a socket's path has at most 107 characters.
LONGEST_ROOT = 20
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

TIMED_OUT = "timed out during startup"


@contextmanager
def private_cluster(resources: dict[str, float], cpus: int | None, keep_logs: Path | None) -> Iterator[Path]:
    """Start it with the given devices, connect, end it; yields the directory of the workers' output.

    With `keep_logs`, that output is copied there in the end; otherwise it is removed with all else.
    """
    root = tempfile.gettempdir() if len(tempfile.gettempdir()) <= LONGEST_ROOT else "/tmp"
    # Ray opens its directory to all users: ours around it stays closed.
    home = Path(tempfile.mkdtemp(prefix="isotrain-", dir=root))
    try:
        with _loopback(), _own_token():
            try:
                yield _start(home, resources, cpus)
            finally:
                ray.shutdown()
                if keep_logs is not None:
                    copy_worker_output(home, keep_logs)
    finally:
        shutil.rmtree(home, ignore_errors=True)


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
        raise ClusterError(f"cannot start a private Ray cluster, at the second try: {error}") from error


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
    """Copy what workers wrote to their standard output and error, leaving out those that wrote nothing."""
    for file in sorted(home.glob("*/session_2*/logs/worker-*")):
        if file.suffix in (".out", ".err") and file.stat().st_size:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / file.name)


def _object_store(home: Path) -> dict[str, Any]:
    """Its size and place: a part of memory, in /dev/shm unless that is too small, as in many containers."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = min(8 * GIB, int(0.3 * memory))
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if free >= GIB // 2:
        return {"object_store_memory": min(wanted, int(0.8 * free))}
    return {"object_store_memory": min(wanted, GIB), "_plasma_directory": str(home)}


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
