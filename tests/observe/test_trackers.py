"""All four trackers with their real packages: the points are read back, and nothing leaves the machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import python_of

pytestmark = pytest.mark.slow
OFFLINE = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "WANDB_SILENT": "true"}
POINTS = [[step, 0.25 * step] for step in range(1, 6)]


class Proxy:
    """Takes every connection that a program makes to other hosts, and closes it."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                self.asked.append(connection.recv(200).split(b"\r\n")[0])

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    yield proxy
    proxy.close()


def tracked(kind: str, directory: Path, proxy: Proxy, **variables: str) -> subprocess.CompletedProcess[str]:
    names = ("http_proxy", "https_proxy", "all_proxy")
    own = {key: value for key, value in os.environ.items() if key.lower() not in (*names, "no_proxy")}
    own |= {name: proxy.address for lower in names for name in (lower, lower.upper())}
    source = str(Path(__file__).parents[2] / "src")
    return subprocess.run(
        [python_of("trackers"), str(Path(__file__).with_name("tracked_run.py")), kind, str(directory)],
        env={**own, "HOME": str(directory), "PYTHONPATH": source, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


def read_back(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "swanlab", "mlflow"])
def test_a_run_and_its_resumed_start_are_read_back(kind: str, tmp_path: Path, proxy: Proxy) -> None:
    found = read_back(tracked(kind, tmp_path, proxy, **OFFLINE))
    print(kind, found["version"])
    assert found["points"] == POINTS, "each step once, in one curve"
    assert found.get("runs", 1) == 1 and not found["torch"]
    assert proxy.asked == []


def test_mlflow_goes_where_its_variable_says(tmp_path: Path, proxy: Proxy) -> None:
    database = f"sqlite:///{tmp_path}/elsewhere.db"
    found = read_back(tracked("mlflow", tmp_path, proxy, MLFLOW_TRACKING_URI=database))
    assert found["points"] == POINTS and (found["name"], found["status"]) == ("name", "FINISHED")
    assert found["config"] == {"seed": "7", "model.path": "x", "rollout.stop": '["</s>"]'}
    assert (tmp_path / "elsewhere.db").exists() and not (tmp_path / "mlflow").exists()


@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        ("wandb", {"WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "5"}),
        ("mlflow", {"MLFLOW_TRACKING_URI": "http://host.invalid", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}),
    ],
)
def test_requests_of_a_tracker_are_seen_by_the_proxy(
    kind: str, variables: dict[str, str], tmp_path: Path, proxy: Proxy
) -> None:
    """Otherwise the tests above could not fail."""
    done = tracked(kind, tmp_path, proxy, **variables)
    assert proxy.asked and done.returncode != 0
    assert f"remove {kind} from observe.loggers" in done.stderr
