"""Which process listens on a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isotrain.errors import RolloutError
from isotrain.rollout.local_server import HOST, Exchange, LocalServer, NoReply, free_port, listens


def test_nobody_ourselves_and_another(tmp_path: Path) -> None:
    port = free_port()
    assert listens(port, os.getpgrp()) is None
    with socket.create_server((HOST, port)):
        assert listens(port, os.getpgrp()) is True
        with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
            assert listens(port, other.pid) is False
            other.kill()
    assert listens(port, os.getpgrp()) is None


def start(work: Path, port: int) -> LocalServer:
    arguments = ["--bind", HOST, str(port)]
    return LocalServer(
        "e", sys.executable, "http.server", arguments, log=work / "log", environment=os.environ
    )


def test_a_port_that_another_process_has_taken(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        server = start(tmp_path, port)
        with pytest.raises(RolloutError, match=f"^e: another process listens on port {port}; start again"):
            server.listens(port)
        server.kill()


def test_the_key_is_not_sent_after_the_server_has_ended(tmp_path: Path) -> None:
    port = free_port()
    server = start(tmp_path, port)
    deadline = time.monotonic() + 30
    while not server.listens(port):
        assert server.ended() is None and time.monotonic() < deadline
        time.sleep(0.05)
    exchange = Exchange("e", server, port, "secret")
    exchange._request("GET", "/", None, 10)
    server.kill()
    with socket.create_server((HOST, port)) as successor:
        successor.settimeout(0.5)
        with pytest.raises(NoReply, match=r"no reply to / \(its server has ended\)"):
            exchange.get("/", 10)
        with pytest.raises(TimeoutError):
            successor.accept()
